"""The Trainer strategies: each hook that Lightning calls on them, once, in the order in which things happen.

A strategy holds its parts, which are told what comes and know nothing of each other's order:

- ``_session``: the process group.
- ``_supervision``: a fault ends all ranks with one cause, a signal stops all at one step.
- ``_checks``: ranks have the same model, optimizers and number of batches; gradients are numbers.
- ``_saving``: files and directories of checkpoints.
- ``_exact_resume``: what a checkpoint needs beside Lightning's, so that a run goes on to the bit.
- ``_sagemaker``: the folders of a SageMaker job.

What a strategy does in its own way is in methods of its own, which the last section here names. (``deepspeed.py`` adds
to some hooks, ``pipeline_ranks.py`` to ``reduce``.) All are written once for both packages that Lightning is published
as: ``lightning.py`` and ``pytorch_lightning.py`` put them on top of their ``DDPStrategy``, or ``DeepSpeedStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp._compat.trainer import is_control_flow, is_stop
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.state.meta_parameters import parameters_on_meta
from lightning_smddp.resume.exact_resume import ExactResume
from lightning_smddp.sharding.optimizer_shards import all_parameters, unwrapped
from lightning_smddp.strategies.front import Front
from lightning_smddp.strategies.launchers import launch_ranks, launch_script
from lightning_smddp.strategies.loss_weighting import LossWeighting
from lightning_smddp.strategies.options import StrategyOptions
from lightning_smddp.strategies.process_group import start_process_group
from lightning_smddp.strategies.run_supervision import RunSupervision
from lightning_smddp.strategies.sagemaker_job import SageMakerJob
from lightning_smddp.strategies.sanity_checks import SanityChecks
from lightning_smddp.strategies.saving import Saving
from lightning_smddp.strategies.uneven import EvenLoader, Join

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class TrainerStrategy(Front, _Base):
    """What ``smddp``, ``smddp_pipeline``, ``smddp_fsdp`` and ``smddp_deepspeed`` have in common."""

    _last_report: CommunicationReport | None = None
    _averages_over_batches = True  # each rank has its own
    _weighting: LossWeighting | None = None
    _join: Join | None = None

    def _hold_parts(self, options: StrategyOptions, close: Callable[[], None] | None = None) -> None:
        super()._hold_parts(options, close)
        self._resume = options.resume
        self._changes = ExitStack()  # of Lightning and of tensors, until teardown
        self._exact_resume = ExactResume()
        self._supervision = RunSupervision(self)
        self._checks = SanityChecks(self)
        self._saving = Saving(self)
        self._sagemaker = SageMakerJob(self)

    @property
    def _module(self) -> LightningModule:
        """The user's, in a run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _speaks(self) -> bool:
        """Whether this rank prints what is known of the run."""
        return self._communication.verbose and self.is_global_zero

    # ---- start ----

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self._launcher
        launcher.launch = partial(launch_script if self._start_method == "popen" else launch_ranks, launcher)
        self._sagemaker.trainer_made()

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``meta_init``: parameters get no memory yet."""
        with super().tensor_init_context(empty_init=empty_init), parameters_on_meta(self._meta_init):
            yield

    @override
    def setup_environment(self) -> None:
        """Start the process group and all that needs it."""
        # First what each rank can judge by itself: an error there needs no other rank. From the process group on the
        # ranks are watched, so that whoever fails in what follows ends all of them.
        self._require_layout()
        self._set_up_environment()
        self._supervision.start()
        self._sagemaker.start()
        self._session.process_group_started()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            self._exact_resume.begin(self.lightning_module.trainer, self.root_device, self._resume)
        self._make_groups()

    @override
    def setup_distributed(self) -> None:
        """Start the process group, which Lightning then finds."""
        self.set_world_ranks()
        start_process_group(self)
        self._join_process_group()

    @override
    def setup(self, trainer: Trainer) -> None:
        """Set up the model and optimizers, and take over signals."""
        self._supervision.take_over(trainer)
        self._set_up_model(trainer)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers, which have to be the same on all ranks."""
        super().setup_optimizers(trainer)
        self._checks.require_same_optimizers()
        self._shard_optimizers()

    # ---- training ----

    @override
    def on_train_start(self) -> None:
        """Print what runs, and begin the first epoch's comparisons."""
        super().on_train_start()
        self._checks.training_starts()
        if self._communication.uneven == "join":
            self._join = Join(self._trainer)
        if self._averages_over_batches:
            self._weighting = LossWeighting(self._communication.loss_weight, self._trainer, self._join)
        self._training_starts()
        self._exact_resume.on_train_start()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Training loaders get a state, which Lightning saves and restores, and with ``uneven`` one length."""
        uneven = self._communication.uneven
        make = partial(EvenLoader, trainer=self._trainer, joins=uneven == "join") if uneven is not None else None
        processed: object = self._exact_resume.process(super().process_dataloader(dataloader), make)
        return processed

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Stop if all are to stop, or if a save in the background has failed."""
        self._supervision.training_batch_starts(batch_idx)
        self._saving.own.raise_failure()
        super().on_train_batch_start(batch, batch_idx)
        self._checks.training_batch_starts()
        self._training_batch_starts()
        if self._weighting is not None:
            self._weighting.batch_starts(batch, batch_idx)

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Tell the supervision that a batch begins, stop there if all are to stop, and move it."""
        self._supervision.batch_begins()
        self._moves_batch(batch)
        return super().batch_to_device(batch, *args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own step."""
        with nullcontext() if self._join is None else self._join.step():
            return self._step("training_step", args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own step."""
        return self._step("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own step."""
        return self._step("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own step."""
        return self._step("predict_step", args, kwargs)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The backward pass: gradients are averaged in it. Those of a pipeline come here from its ``training_step``."""
        self._supervision.phase("backward")
        weighting = self._weighting
        if weighting is not None:
            closure_loss = weighting.scaled(closure_loss)
        if self._checks.watches_gradients:
            self._guard.note(closure_loss)
        with self._averaging(closure_loss):
            result = super().backward(closure_loss, *args, **kwargs)
            if weighting is not None:
                weighting.backward_ends()
        return result

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure comes first: the training step and its backward pass. Then gradients are looked at."""
        # Lightning's step calls torch's with the closure, which is called in there, so that in time it is:
        #   shards stand next to the step -> closure: training step, backward -> gradients are looked at -> update
        take_step = super().optimizer_step

        def step(closure: Callable[[], Any]) -> Any:
            with self._stepping(optimizer):
                return take_step(optimizer, closure, model, **kwargs)

        def trained() -> Any:
            result = closure()
            self._supervision.phase("optimizer")
            return result

        result = self._checks.around_step(optimizer, trained, step)
        self._supervision.phase("data")
        return result

    @override
    def on_validation_start(self) -> None:
        """Ranks that came to the end of an epoch wait for each other before validation."""
        self._supervision.validation_starts()
        self._synchronize()
        super().on_validation_start()

    @override
    def on_train_end(self) -> None:
        """Say what communication cost; save the final model in a SageMaker job."""
        super().on_train_end()
        self._sagemaker.training_ends()
        self._training_ends()

    # ---- end ----

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Leave SageMaker word of what has failed, also before there is a process group."""
        super().on_exception(exception)
        if not is_stop(exception) and not is_control_flow(exception):
            self._sagemaker.write_failure(exception)

    @property
    def _interrupted(self) -> bool:
        """Whether an exception ended the run: other ranks may be gone."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.interrupted

    @override
    def teardown(self) -> None:
        """Free shared memory, threads and sockets. Hooks follow, so the supervision goes on until the run's end."""
        self._weighting = self._join = None
        self._changes.close()
        # First what takes all ranks, a whole module, as long as there is what it is sent by.
        self._exact_resume.close()
        self._release_model()
        self._session.close()
        self._sagemaker.end()
        self._supervision.phase("teardown")
        try:
            self._tear_down_model()
        finally:
            self._supervision.let_go()

    # ---- checkpoints ----

    @property
    @override
    def checkpoint_io(self) -> Any:
        """The one that the user gave, or ``SafeCheckpointIO`` (``saving.py``); made when Lightning first asks."""
        self._checkpoint_io = self._saving.choose_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with what it takes to go on exactly. Errors are raised on every rank. Collective."""
        if self._is_out_of_reach:
            rank_zero_warn(
                f"{filepath} is not saved: an exception ended the run, and ranks with parts of it may be gone."
            )
            return
        # All ranks come here, also where the first one alone writes: what each has of its own is gathered.
        self._exact_resume.add_to(checkpoint, self._decisions())
        self._add_to(checkpoint)
        self._supervision.phase("checkpoint")
        self._saving.save(checkpoint, filepath, storage_options)
        self._sagemaker.saved(checkpoint, filepath)
        self._supervision.phase("data")

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove, once what is being written is complete; directories are written behind a CheckpointIO of theirs."""
        io, remove = self.checkpoint_io, partial(super().remove_checkpoint, filepath)
        if getattr(io, "checkpoint_io", io) is self._saving.own:  # it waits by itself
            remove()
        else:
            self._saving.own.afterwards(remove)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state, on global rank 0; with ``sharded`` of each rank its part. Collective."""
        return {} if self._is_out_of_reach else self._model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state, on global rank 0; with ``sharded`` of each rank its part. Collective."""
        return {} if self._is_out_of_reach else self._optimizer_state(unwrapped(optimizer))

    @property
    def _is_out_of_reach(self) -> bool:
        """Whether other ranks have parts of a checkpoint, and may be gone."""
        return self._interrupted and self._is_divided

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load what a Trainer has saved, a file or a directory."""
        checkpoint = self._saving.load(checkpoint_path, weights_only)
        self._exact_resume.take(checkpoint)
        return checkpoint

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Lightning restores into the whole module before setup, or, where it is whole nowhere, into its parts."""
        return super().restore_checkpoint_after_setup or self._meta_init

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states."""
        self._saving.require_as_many_optimizers(checkpoint)
        self._load_optimizers(checkpoint)

    # ---- between ranks ----

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, unless an exception has ended the run: they may be gone, or wait for something else."""
        self._require_outside_of_step()
        if not self._interrupted:
            super().barrier(*args, **kwargs)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As of ``DDPStrategy``; what is logged in a step is reduced over the ranks that have data for it."""
        if self._join is not None:
            tensor = self._join.share(tensor, group, reduce_op)
        return super().reduce(tensor, group, reduce_op)

    # ---- what a strategy defines, beside what `Front` has ----

    def _require_layout(self) -> None:
        """Before anything starts: raise ``ValueError`` if the options do not fit the number of ranks."""

    def _set_up_environment(self) -> None:
        super().setup_environment()

    def _join_process_group(self) -> None:
        super().setup_distributed()

    def _make_groups(self) -> None:
        """Make the process groups that the strategy needs beside the default one. Collective."""

    def _set_up_model(self, trainer: Trainer) -> None:
        super().setup(trainer)

    def _training_starts(self) -> None:
        """Before the first batch of a fit."""

    def _training_batch_starts(self) -> None:
        """Behind the user's hooks at the start of a batch."""

    def _epoch_ends(self) -> None:
        """Behind the hooks of an epoch's last batch, before ranks wait for each other."""

    def _synchronize(self) -> None:
        """Where all ranks are at an epoch's end, and before a validation: what is looked at now has to be of all."""

    def _training_ends(self) -> None:
        """Behind the last batch of a fit."""

    def _step(self, hook: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the module's step ``hook``."""
        return getattr(super(), hook)(*args, **kwargs)

    def _moves_batch(self, batch: Any) -> None:
        """Before ``batch`` is moved to the device."""

    def _shard_optimizers(self) -> None:
        """Let ranks share the work of the optimizers, which all ranks have. Collective."""

    def _require_outside_of_step(self) -> None:
        """Raise if ranks cannot wait for each other here."""

    def _release_model(self) -> None:
        """At the end of a run: give the module back to the user."""

    def _tear_down_model(self) -> None:
        super().teardown()  # with it the user's CheckpointIO, which does not reach ours
        self._saving.own.teardown()

    @property
    def _is_divided(self) -> bool:
        """Whether other ranks have parts of what a checkpoint has; False if this one has all."""
        return False

    def _decisions(self) -> Mapping[str, Any]:
        """What was chosen in this run, and a resumed one has to choose as well; anything that JSON carries."""
        return {}

    def _add_to(self, checkpoint: dict[str, Any]) -> None:
        """Add what else the strategy needs of a checkpoint."""

    def _model_state(self) -> dict[str, Any]:
        return super().lightning_module_state_dict()

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return super().optimizer_state(optimizer)

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)

    @property
    def _has_part_to_save(self) -> bool:
        """With ``sharded``: whether this rank writes a part of each checkpoint; other ranks have the same values."""
        return self.is_global_zero

    def _optimized(self, optimizer: Optimizer) -> Sequence[Tensor]:
        """All parameters of an optimizer of the whole module."""
        return all_parameters(optimizer)

    @property
    def _nonfinite_group(self) -> dist.ProcessGroup:
        """The ranks that find the same at once."""
        return world()
