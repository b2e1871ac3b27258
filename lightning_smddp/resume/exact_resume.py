"""A resumed run that goes on as if it had never stopped: the same samples and random numbers, to the bit.

What Lightning's checkpoints lack is added to them under one key: for every rank the states of its random numbers, how
far its training loaders are, and by which random numbers they came there. It is plain tensors, numbers and strings.

On resume, where Lightning makes the iterators of an epoch, ours are made with the random numbers of that time, skip
what was seen, and then the random numbers of the checkpoint are put back. See ``docs/checkpoints.md``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp._compat.loops import (
    RestartPoint,
    around_training_data,
    around_validation,
    begun_batches,
    continues_epoch,
    cycles,
    epoch_has_ended,
    fetched_ahead,
    is_restarted,
    iterate_over,
    set_back,
    set_before_validation,
    set_cycles,
    steps_fetch,
    trained_batches,
    trained_last_batch,
    validated_batches,
)
from lightning_smddp.resume.auto_resume import continuing
from lightning_smddp.resume.layouts import LayoutRank, Position, Resumption, facts_of, resume_at
from lightning_smddp.resume.random_states import RandomStates, seed_all
from lightning_smddp.resume.recorded_loader import RecordedLoader, keeps_workers
from lightning_smddp.strategies.tables import without_warning
from lightning_smddp.wire.encode import pack, unpack
from lightning_smddp.wire.gather import gather_bytes

CHECKPOINT_KEY = "smddp_resume"
_VERSION = 1


class ExactResume:
    """One fit's part in checkpoints. A strategy calls the public methods, in this order.

    :meth:`before_setup`, :meth:`start` and :meth:`close` around a fit, :meth:`take` with the checkpoint that it starts
    from, :meth:`on_train_start`, and :meth:`add_to` for each checkpoint that it saves.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._rank = LayoutRank(0, 0, 1, 1)
        self._device = torch.device("cpu")
        self._states = RandomStates(self._device)
        self._loaders: list[RecordedLoader] = []
        self._combined: Any = None
        self._originals: list[Any] = []
        self._saved: Mapping[str, Any] | None = None
        self._resumption: Resumption | None = None
        self._last_step: Position | None = None
        self._validation: tuple[Position, dict[str, Any]] | None = None  # where it began, while it runs
        self._point: RestartPoint | None = None
        self._changes = ExitStack()

    def before_setup(self, trainer: Any, resume: str | None, device: torch.device) -> None:
        """The process group is up, and no checkpoint is loaded yet. ``resume`` is the strategy's option."""
        self.close()
        if resume == "auto":
            self._changes.enter_context(continuing(trainer, device))

    def start(self, trainer: Any, rank: LayoutRank, device: torch.device) -> None:
        """A fit is about to run."""
        self.close()
        self._trainer = trainer
        self._rank = rank
        self._device = device
        self._saved = self._resumption = self._last_step = self._validation = None
        self._states = RandomStates(device)
        self._point = RestartPoint(trainer)
        training = around_training_data(trainer, self._prepare, self._reset, self._begin_epoch)
        self._changes.enter_context(training)
        validation = around_validation(trainer, self._begin_validation, self._end_validation)
        self._changes.enter_context(validation)

    def close(self) -> None:
        """The fit has ended, in whatever way."""
        self._changes.close()
        self._release()

    # ---- saving ----

    def add_to(self, checkpoint: dict[str, Any], decisions: Mapping[str, Any] | None = None) -> None:
        """Add what resuming needs, and the strategy's ``decisions`` (anything that JSON carries). Collective.

        Only the first rank's ``checkpoint`` gets it. Nothing is added to checkpoints of weights alone, nor after an
        exception, when other ranks may be gone. In the middle of a step, or of an accumulation, whose gradients no
        checkpoint has, the checkpoint is set back to the end of the last optimizer step: a resumed run trains the
        batches since then again. In the middle of a validation it is set back to the begin of that.
        """
        trainer = self._trainer
        if trainer is None or trainer.interrupted or "optimizer_states" not in checkpoint:
            return
        validated: dict[str, Any] | None = None
        if self._validation is None:
            position = self._position()
        else:
            position, validated = self._validation
        in_step = position is self._last_step
        if in_step:
            set_back(checkpoint, position.trained)
        if validated is not None:
            set_before_validation(checkpoint, validated, in_step)
        # Lightning writes what the first rank has. Each rank has random numbers and a place in its data of its own,
        # which go into the one checkpoint.
        ranks = gather_states(position.to_plain(self._rank), self._device)
        if not ranks:  # another rank writes it
            return
        checkpoint[CHECKPOINT_KEY] = {
            "version": _VERSION,
            "layout": self._rank.layout,
            "step": trainer.global_step,
            "seed": ranks[0]["seed"],
            "ranks": ranks,
        }
        for name, value in (decisions or {}).items():
            checkpoint[CHECKPOINT_KEY][name] = json.dumps(value)

    def _position(self) -> Position:
        """Where a run that is resumed here has to go on."""
        trainer = self._trainer
        if not self._loaders or steps_fetch(trainer):
            return self._now(0)
        # Gradients are in no checkpoint. Where some are there, in a batch or between those of an accumulation, the run
        # goes on from the last place that had none: `_before_fetch` has noted it. Lightning steps with the last batch
        # of an epoch whatever is accumulated, so behind that none are there.
        trained = trained_batches(trainer)
        has_gradients = begun_batches(trainer) != trained
        if trained % trainer.accumulate_grad_batches != 0 and not epoch_has_ended(trainer):
            has_gradients = True
        if has_gradients and self._last_step is not None:
            return self._last_step
        return self._now(trained)

    def _begin_validation(self) -> None:
        self._validation = self._position(), validated_batches(self._trainer)

    def _end_validation(self) -> None:
        self._validation = None

    def _now(self, trained: int, now: dict[str, Any] | None = None) -> Position:
        position = Position(trained, now or self._states.capture())
        if self._loaders:
            position.ahead = fetched_ahead(self._trainer)
            position.cycles = cycles(self._combined)
            position.facts = [facts_of(loader) for loader in self._originals]
            position.courses = [loader.now() for loader in self._loaders]
        return position

    def _before_fetch(self, now: dict[str, Any]) -> None:
        """The last moment before a batch is fetched, and before its training begins."""
        begun = begun_batches(self._trainer)
        if begun % self._trainer.accumulate_grad_batches == 0:
            self._last_step = self._now(begun, now)

    # ---- resuming ----

    def take(self, checkpoint: Mapping[str, Any]) -> None:
        """The checkpoint that the fit starts from."""
        saved = checkpoint.get(CHECKPOINT_KEY)
        if saved is not None and saved["version"] != _VERSION:
            saved = None
        self._saved = saved

    def saved(self, key: str) -> Any:
        """What :meth:`add_to` got as ``more[key]``, if this run has the layout of that one; else None."""
        if self._saved is None or self._saved["layout"] != self._rank.layout:
            return None
        return json.loads(self._saved.get(key, "null"))

    def on_train_start(self) -> None:
        """Put random numbers back, before the first hook of an epoch."""
        self._restore_now()

    def _restore_now(self) -> None:
        resumption = self._resumption
        if resumption is None:
            return
        if resumption.now is not None:
            self._states.restore(resumption.now)
        elif self._saved is not None:
            # The checkpoint has no random numbers that fit this rank. Replicas get different ones, all ranks of a
            # replica the same, and not those of the run's begin once more.
            seed_all(self._saved["seed"], self._rank.replica, self._saved["step"])

    def _prepare(self, combined: Any) -> None:
        """Lightning has loaders, and is about to make iterators of them."""
        self._release()
        loaders = list(combined.flattened)
        self._states = RandomStates(self._device, loaders)
        if not any(_saves_itself(loader) for loader in loaders):
            self._combined, self._originals = combined, loaders
            self._loaders = [RecordedLoader(loader, self._states) for loader in loaders]
            self._loaders[0].before_fetch = self._before_fetch
            iterate_over(combined, self._loaders)
        if self._saved is None or not is_restarted(self._trainer) or self._resumption is not None:
            return
        self._resumption = resume_at(
            self._saved,
            self._rank,
            self._originals,
            trained_batches(self._trainer),
            self._trainer.accumulate_grad_batches,
        )
        # Lightning makes iterators right behind this, while random numbers are not yet the checkpoint's: those give
        # nothing and draw nothing. `_begin_epoch` has the ones made that count.
        for loader in self._loaders:
            loader.holds = True
        self._changes.enter_context(without_warning("You're resuming from a checkpoint that ended before"))

    def _warn(self, resumption: Resumption, in_epoch: bool) -> None:
        """One line of what is not as in the unbroken run."""
        differs = list(resumption.differs)
        if in_epoch:
            differs += resumption.in_epoch
        for loader, course in zip(self._originals, resumption.courses, strict=True):
            if not keeps_workers(loader):
                continue
            # Workers that have begun in this epoch begin in it again.
            had_workers = course.workers_live
            if not in_epoch and course.created is not None:
                had_workers = True
            if had_workers:
                differs.append(
                    "random numbers that are drawn in persistent workers, which are started anew, and by samplers that "
                    "draw in `__iter__` itself"
                )
                break
        if differs and _is_first_rank():
            what = "; ".join(differs)
            warnings.warn(f"The run is not continued exactly: {what}.", stacklevel=2)

    def _reset(self) -> None:
        if self._resumption is not None and self._point is not None:
            self._point.reset()

    def _begin_epoch(self, data_fetcher: Any) -> None:
        """Lightning makes iterators here, but for the first epoch of a fit, which has some."""
        trainer, resumption = self._trainer, self._resumption
        if resumption is None:
            self._warn_of_repetition()
            return
        continues = continues_epoch(trainer)
        ended = continues and epoch_has_ended(trainer)
        # Epochs may have fewer batches than in the checkpoint: then this one has ended without all of its samples.
        self._warn(resumption, in_epoch=continues and not trained_last_batch(trainer))
        assert self._point is not None
        self._point.begin()
        # The iterators of the unbroken run are made again, and skip what it had seen. That draws random
        # numbers, so those of the checkpoint are put back behind it.
        if self._loaders:
            for loader, course in zip(self._loaders, resumption.courses, strict=True):
                loader.holds = ended
                if continues and not ended:
                    loader.resume(course, resumption.ahead)
                else:
                    loader.begin_anew(course)
            iter(data_fetcher)
            for loader in self._loaders:
                loader.holds = False
            if continues:
                set_cycles(self._combined, resumption.cycles)
        if continues:
            self._restore_now()
        self._resumption = None

    def _warn_of_repetition(self) -> None:
        trainer = self._trainer
        if not is_restarted(trainer) or not continues_epoch(trainer):
            return
        in_epoch = trained_batches(trainer) > 0 and not epoch_has_ended(trainer)
        if in_epoch and _is_first_rank():
            warnings.warn(
                "The checkpoint was saved in the middle of an epoch without the state of its data and random numbers "
                "(by another strategy, or while training failed), so the epoch's first samples come again.",
                stacklevel=2,
            )

    def _release(self) -> None:
        """Put Lightning's own loaders back in the place of recorded ones."""
        if self._combined is not None:
            iterate_over(self._combined, self._originals)
        self._loaders = []
        self._originals = []
        self._combined = None


def _saves_itself(loader: Any) -> bool:
    """Whether Lightning has its state in checkpoints, as that of a ``StatefulDataLoader``."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_states(state: Any, device: torch.device) -> list[Any]:
    """Every rank's ``state``, in the order of global ranks, on the first rank; an empty list on the others.

    Collective over the world, if there is one.

    Args:
        state: values of :data:`~lightning_smddp.wire.encode.FORMS`; tensors of the CPU.
        device: where the group's collectives take their tensors from.
    """
    packed = pack(state)
    if not dist.is_initialized():
        return [unpack(packed)]
    world = dist.group.WORLD
    assert world is not None
    gathered = gather_bytes(packed.to(device), world)
    if world.rank() != 0:  # what it does not write it need not decode
        return []
    return [unpack(data) for data in gathered]
