"""A Trainer's run under supervision: faults end all ranks with one cause, signals stop them at one step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_smddp._compat.torch import default_store
from lightning_smddp._compat.trainer import (
    is_control_flow,
    is_stop,
    no_batch_follows,
    own_stops,
    received_stop,
    stop_exception,
    will_step,
)
from lightning_smddp.communication.groups import mark_groups_aborted
from lightning_smddp.communication.objects import RankFailedError, gather
from lightning_smddp.resume.auto_resume import stop_checkpoint
from lightning_smddp.strategies.checks import has_changed
from lightning_smddp.strategies.launchers import launcher_pid, may_be_ended
from lightning_smddp.strategies.tables import say
from lightning_smddp.supervision.processes import name_of
from lightning_smddp.supervision.stop import END, write_stderr
from lightning_smddp.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_smddp.strategies.base import TrainerStrategy

_WITHIN = 2**24  # places within a validation: more than it has batches
_AFTER_THE_FIRST_S = 2.0  # launchers show the error of the rank that ends first, which should be the one that failed


class RunSupervision:
    """Watches the job from before the first collective to the end of the run. A strategy calls it where hooks come.

    Args:
        strategy: of the Trainer. Its options and its run are asked for when they are needed.
    """

    def __init__(self, strategy: TrainerStrategy) -> None:
        self.strategy = strategy
        self.supervisor: Supervisor | None = None
        self._lightnings = ExitStack()  # gives Lightning back what stops have changed
        self._place = 0  # to stop at, where this rank is: the same numbers on all ranks
        self._stops_within = False  # a validation: all ranks have equally many batches of it

    # ---- start and end ----

    def start(self) -> None:
        """Connect to the other ranks' supervisors, over the default group's store. Collective."""
        if self.supervisor is not None or not dist.is_initialized():
            return
        strategy = self.strategy
        self._place = 0
        rank, world_size = strategy.global_rank, strategy.world_size
        timeout_s, grace_s = strategy._limit.total_seconds(), strategy._reliability.stop_limit_s
        self.supervisor = Supervisor(default_store(), rank, world_size, timeout_s, grace_s, launcher_pid())
        if strategy.root_device.type == "cuda" and world_size > 1:
            self.supervisor.has_work = lambda: not torch.cuda.default_stream(strategy.root_device).query()

    def take_over(self, trainer: Trainer) -> None:
        """From here on signals stop the run by agreement, and epochs end together."""
        if self.supervisor is not None:
            self._lightnings.enter_context(own_stops(trainer, self.supervisor.stops.take_signals, self._end_epoch))

    def let_go(self) -> None:
        """Give Lightning back what stops have changed. Hooks follow, so the others are watched until the run's end.

        Behind an error this comes behind ``run``.
        """
        self._lightnings.close()
        if self.supervisor is not None and self.supervisor.shutdown.is_handled:
            self.supervisor.close()
            self.supervisor = None

    # ---- errors ----

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What launchers call in each rank: an error that another one caused names that; a stop ends the process so."""
        self.strategy._session.failed = False
        try:
            result = function(*args, **kwargs)
            self._end_run()
            return result
        except BaseException as error:
            explained = self._explain(error)
            self.strategy._session.failed = not is_stop(explained)
            if explained is error:
                raise
            raise explained from error

    def _end_run(self) -> None:
        """Say goodbye to the other ranks. What came too late for a step to see it counts: a failure, a stop."""
        supervisor = self.supervisor
        if supervisor is None:
            return
        # The last place to hear of what came behind the last step: who ended without a look here would call a run a
        # success that others have seen fail, or stop.
        supervisor.gate(END)
        if (failure := supervisor.close()) is not None:
            raise failure.error()
        if supervisor.stops.decision is not None:
            raise stop_exception(self.strategy._trainer)
        self.supervisor = None

    def _explain(self, error: BaseException) -> BaseException:
        supervisor = self.supervisor
        if supervisor is not None:
            supervisor.shutdown.take_over(error, self.hooks_after_exception_s(self.strategy._trainer))
        if supervisor is None or is_control_flow(error):
            return error
        if supervisor.own.signal and is_stop(error):
            supervisor.shutdown.take_over(error, supervisor.grace)  # a node may go before another one has saved
            try:
                self._end_by_stop(error, supervisor.own.signal)
                return error
            except Exception as failed:
                error = failed
        # What follows from another rank's failure, such as gloo's "Connection closed by peer", becomes an error that
        # names the first cause; a rank's own exception stays as it is, and is told to the others.
        explained = supervisor.explain(error)
        failure = supervisor.failure
        if failure is not None:
            mark_groups_aborted()
            is_others = explained is not error or isinstance(error, RankFailedError)
            if is_others and may_be_ended():  # before its traceback
                write_stderr(f"lightning-smddp: {failure.text}\n")
                time.sleep(_AFTER_THE_FIRST_S if failure.kind == "failed" else 0.0)
        if isinstance(error, SystemExit) and not error.code:
            error.code = 1  # it leaves the other ranks alone, and must not look like success
        return explained

    def hooks_after_exception_s(self, trainer: Trainer) -> float:
        """How long the user's own ``on_exception`` may take, such as an upload, before a process is ended by force."""
        has_hook = has_changed(trainer, "on_exception")
        return self.strategy._reliability.stop_limit_s if has_hook else 0.0

    def _end_by_stop(self, error: BaseException, signum: int) -> None:
        """Save what is needed to go on, give the exception the exit code of a stop, and say what is left."""
        trainer = self.strategy._trainer
        text = "nothing is saved: no training was under way any more"
        if trainer.received_sigterm and trainer.state.fn == "fit":
            path = stop_checkpoint(trainer)
            trainer.save_checkpoint(path, weights_only=False)
            self.strategy._saving.finish()
            text = f"saved to {path}, from which resume='auto' or `ckpt_path` goes on"
        if isinstance(error, SystemExit):
            error.code = 128 + signum
        if self.strategy.is_global_zero:
            say(f"{name_of(signum)}: all ranks stop at step {trainer.global_step}; {text}.", trainer)

    # ---- steps ----

    def phase(self, name: str) -> None:
        """What this rank does from here on, for those who look for the one that is behind. Raises a job's failure.

        So a step is not taken whose gradients came from collectives that were aborted.
        """
        if self.supervisor is not None:
            self.supervisor.begin(name)
            if name != "teardown":
                self.supervisor.raise_failure()

    def training_batch_starts(self, batch_idx: int) -> None:
        """Note where this rank is, and whether all are to stop behind this batch."""
        trainer = self.strategy._trainer
        if self.supervisor is not None:
            self.supervisor.begin_batch(trainer.global_step, batch_idx + 1)
        # Not in the middle of an accumulation, whose gradients no checkpoint has.
        if will_step(trainer):
            self._look_for_stop()

    def validation_starts(self) -> None:
        """Ranks that came to the end of an epoch wait for each other before validation."""
        trainer = self.strategy._trainer
        # A place to stop at has to be one that all ranks come to: within a validation only if all have as many batches.
        self._stops_within = False
        if self.supervisor is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            if no_batch_follows(trainer):
                self._end_epoch()
            else:
                self.supervisor.own.begun += 1  # no rank at the end of the epoch can wait for this one
            if will_step(trainer):
                lengths = set(gather(sum(trainer.num_val_batches)))
                self._stops_within = len(lengths) == 1 and float("inf") not in lengths
        self.phase("validation")

    def _look_for_stop(self, within: bool = False) -> None:
        """Lightning ends a run at the end of the batch (and its validation) if a stop was received."""
        # `gate` looks at a flag, unless a signal has come: then it holds this rank until the supervisors' threads have
        # agreed on the first place that all ranks can still reach, which they do also while a rank is blocked in a
        # collective. The answer is the same on all ranks, as places are.
        # Behind a validation it is the same, too, where a loader had fewer batches than its length says.
        self._place = self._place + 1 if within else (self._place // _WITHIN + 1) * _WITHIN
        trainer = self.strategy._trainer
        if self.supervisor is not None and self.supervisor.gate(self._place):
            received_stop(trainer)
            if trainer.state.fn != "fit":
                raise stop_exception(trainer)

    def _end_epoch(self) -> None:
        """Ranks with other numbers of batches would average gradients of different epochs from here on."""
        if self.supervisor is not None and not self.strategy._trainer.received_sigterm:
            self.strategy._epoch_ends()
            self.supervisor.end_of_epoch(self.strategy._trainer.current_epoch)
            self.strategy._synchronize()

    def batch_begins(self) -> None:
        """Outside of training this is where to stop."""
        if self.supervisor is None:
            return
        trainer = self.strategy._trainer
        is_fit = trainer.state.fn == "fit"
        self.phase(self.supervisor.own.phase if is_fit else str(trainer.state.fn))
        if not is_fit:
            self._look_for_stop()
        elif trainer.validating and self._stops_within:
            self._look_for_stop(within=True)  # Lightning ends the run behind this batch
