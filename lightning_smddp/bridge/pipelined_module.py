"""A LightningModule on the ranks of a pipeline, in whatever state: from its first batch to the end of a run.

The first training batch decides: the module is partitioned by it, or replicated where that is not possible; see
``module_states.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.bridge.batch_cutting import BatchCutter
from lightning_smddp.bridge.batch_results import BatchResults
from lightning_smddp.bridge.capture import StepCapture
from lightning_smddp.bridge.deferred_backward import scale_of
from lightning_smddp.bridge.evaluation import Evaluation
from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.module_states import Unpartitioned
from lightning_smddp.bridge.partition_table import print_partition, print_replicated
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.partitioning import Partitioning
from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.bridge.replicated_module import ReplicatedModule
from lightning_smddp.bridge.run_setup import RunSetup, warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep, Scale
from lightning_smddp.bridge.training import Training
from lightning_smddp.bridge.whole_again import (
    BY_EXCEPTION,
    WholeAgain,
    gather_at_end,
    gather_in_training,
    leave_in_parts,
    require_whole_possible,
)
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.gradients.across_stages import give_back_clipping, take_over_clipping
from lightning_smddp.pipeline.mesh import Groups
from lightning_smddp.pipeline.partition.hardware import fits_on_devices
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.partition.same_batch import BatchAgreement
from lightning_smddp.pipeline.partition.verify import VerificationError
from lightning_smddp.pipeline.runtime.host_values import HostValues
from lightning_smddp.pipeline.state.optimizer_state import require_divisible
from lightning_smddp.pipeline.view.global_view import GlobalView
from lightning_smddp.sharding.optimizer_shards import OptimizerShards

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class PipelinedModule:
    """Runs a LightningModule's steps, and holds what is the same in all its states.

    Args:
        module: the user's.
        options: the strategy's.
        groups: this rank's position in the mesh, and its process groups.
        device: of this rank.
        step_context: makes, for the name of a step, the context that Lightning enters around it.
        timeout: of collectives.

    Attributes:
        state: what the module is now.
        known_plan: the decision of the run that is resumed, which has the same stages then.
        watching: whether gradients are watched for NaN and inf.
        marking: see ``NonFiniteWatch.marks``.
        shards: of the optimizers; empty without ``shard="optimizer"``.
        shown: names of steps whose table was printed.
    """

    def __init__(
        self,
        module: LightningModule,
        options: PipelineOptions,
        groups: Groups,
        device: torch.device,
        step_context: Callable[[str], AbstractContextManager[Any]],
        timeout: timedelta,
    ) -> None:
        self.setup = setup = RunSetup(module, options, groups, device, step_context, timeout)
        self.module = module
        self.state: Unpartitioned | PartitionedModule | ReplicatedModule | WholeAgain = Unpartitioned(setup)
        self.known_plan: Mapping[str, Any] | None = None
        self.watching = False
        self.marking = True
        self.shown: set[str] = set()
        self.host_values = HostValues()
        self._agreement = BatchAgreement(groups.pipeline, device, groups.host, self.host_values)
        replicas = None
        if setup.num_replicas > 1:
            replicas = groups.data_parallel_group
        self.metrics = PipelineMetrics(module, groups.pipeline, setup.last_rank, device, replicas)
        self.capture = StepCapture(module, metrics=self.metrics)
        self._cutter = BatchCutter(setup, self.host_values)
        results = BatchResults(setup, self.capture, self.metrics, self._cutter)
        self._training = Training(setup, self._cutter, results)
        self._evaluation = Evaluation(setup, self._cutter, results)
        self._optimizers: list[Optimizer] = []
        self.shards: list[OptimizerShards] = []
        self._precision_plugin: Any = None

    @property
    def partitioned(self) -> PartitionedModule | None:
        """The module with its stages, while it has some."""
        if isinstance(self.state, PartitionedModule):
            return self.state
        return None

    @property
    def replicated(self) -> ReplicatedModule | None:
        """The module whose training steps run as a whole on every rank, if it is one."""
        if isinstance(self.state, ReplicatedModule):
            return self.state
        return None

    @property
    def view(self) -> GlobalView | None:
        """The module as a whole, for hooks; None where each rank has it anyway."""
        partitioned = self.partitioned
        if partitioned is None:
            return None
        return partitioned.view

    def to_device(self) -> None:
        """Move the module to the device if it has memory and fits as a whole; else its parts go when there are some.

        Collective over all ranks: what they do at the first batch depends on it, so they all do the same.
        """
        if any(p.is_meta for p in self.module.parameters()):
            return
        if fits_on_devices(self.module, self.setup.world, self.setup.device):
            self.module.to(self.setup.device)

    # ---- steps ----

    def train(
        self,
        batch: Any,
        arguments: Sequence[Any],
        scale: Scale,
        continues: bool,
        may_drop: bool,
        accumulates: bool,
    ) -> Any:
        """Forward and backward of a batch; what the step returns for the whole of it, on every rank.

        Of a :attr:`replicated` module forward only, or what the step itself does besides.

        Args:
            batch: as Lightning gives it.
            arguments: the step's others.
            scale: the loss is multiplied by it before backward.
            continues: gradients are added to those of the batch before.
            may_drop: what is in ``.grad`` now will be zeroed before anybody reads it.
            accumulates: no optimizer step follows.
        """
        batch = self._agreement.agree(batch, "training_step")
        step = self._begin_step("training_step", arguments, scale)
        is_first = isinstance(self.state, Unpartitioned)
        if isinstance(self.state, Unpartitioned):
            self._partition_or_replicate(self.state, step, batch)
        if isinstance(self.state, ReplicatedModule):
            name = f"{step.hook} of {step.batch_name()}"
            return self.state.train(step.whole(batch), name, accumulates)
        partitioned = self.partitioned
        assert partitioned is not None
        begin = functools.partial(partitioned.stash.begin, continues, may_drop, accumulates)
        try:
            return self._training.run(partitioned, step, batch, is_first, begin, continues)
        except SplitError as error:
            # Nothing of the attempt is left, on any rank, and all have the same error: so the batch begins again, as a
            # whole.
            self._become_whole(partitioned, error)
            return self.train(batch, arguments, scale, continues, may_drop, accumulates)

    def evaluate(self, hook: str, batch: Any, arguments: Sequence[Any], may_wait: bool) -> Any:
        """One batch forward; what the step returns for the whole of it, on every rank.

        Args:
            hook: name of the step.
            batch: as Lightning gives it.
            arguments: the step's others.
            may_wait: training follows, so there is no need to partition the module by this step.
        """
        batch = self._agreement.agree(batch, hook)
        step = self._begin_step(hook, arguments)
        if isinstance(self.state, ReplicatedModule):
            return self.state.evaluate(step.whole(batch))
        if isinstance(self.state, Unpartitioned):
            waits = may_wait and self.setup.is_whole()
            if waits or not self._is_partitioned_by(self.state, step, batch):
                return step.whole(batch)()
        partitioned = self.partitioned
        assert partitioned is not None
        return self._evaluation.run(partitioned, step, batch)

    def _is_partitioned_by(self, before: Unpartitioned, step: LightningStep, batch: Any) -> bool:
        """Partition the module by an evaluation step; False if that cannot be pipelined. Collective."""
        if self._evaluation.is_in_lockstep(step):
            return False
        try:
            self._partition(before, step, self._cut(batch, step), None)
        except SplitError as error:
            if not self.setup.is_whole():
                raise own_error(error) from None
            self._evaluation.keep_in_lockstep(step, own_error(error))
            return False
        return True

    def _begin_step(self, hook: str, arguments: Sequence[Any], scale: Scale = 1.0) -> LightningStep:
        context = functools.partial(self.setup.step_context, hook)
        return LightningStep(self.module, hook, arguments, context, self.capture, scale)

    def _cut(self, batch: Any, step: LightningStep) -> list[MicroBatch]:
        return self._cutter.cut(batch, step, can_try=self.setup.is_whole())

    # ---- from one state to another ----

    def _partition_or_replicate(self, before: Unpartitioned, step: LightningStep, batch: Any) -> None:
        """Partition the module by its training step, or leave it whole if that is not possible. Collective."""
        try:
            for optimizer in self._optimizers:
                require_divisible(optimizer)
            microbatches = self._cut(batch, step)
            try:
                self._partition(before, step, microbatches, self._cutter.pair(batch, microbatches))
            # A step may fail on a part of a batch alone, as it counts on a number of rows: then whole batches are
            # tried.
            except StepFailedError as error:
                if len(microbatches) == 1:
                    raise
                self._cutter.parts_fail = True
                self._partition(before, step, self._cut(batch, step), None)
                self._cutter.refuse_parts(step, f"it fails on a part ({own_error(error)!r})")
        except (SplitError, VerificationError) as error:
            if self.setup.options.partition.fallback == "error" or not self.setup.is_whole():
                raise own_error(error) from None
            self.replicate(str(error))

    def _partition(
        self,
        before: Unpartitioned,
        step: LightningStep,
        parts: Sequence[MicroBatch],
        pair: MicroBatch | None,
    ) -> None:
        """Find stages, and let go of other ranks' parameters. Collective over all ranks."""
        partitioned = Partitioning(before, step, parts, pair, self.known_plan).run()
        self.state = partitioned
        weighed = partitioned.weighed
        self._cutter.looks_across_rows = not weighed.weighting.fits
        if weighed.whole:
            self._cutter.keep_whole(step)
        self._cutter.may_try = False
        if partitioned.replicas is not None:
            partitioned.replicas.watching = self.watching
            partitioned.replicas.marking = self.marking
        if step.trains:
            self._training.second_check.expect(self.module.trainer.global_step)
        is_shown = step.trains or not self.shown
        self.shown.add(step.hook)
        if is_shown and self.setup.options.gradients.communication.verbose and dist.get_rank() == 0:
            weighting = None  # where a training step's batches are one micro-batch
            if not (step.trains and self._cutter.is_whole(step)):
                weighting = weighed.weighting
            print_partition(step.hook, partitioned, parts, weighting)
        for warning in weighed.warnings:
            warn_on_first_rank(warning)

    def replicate(self, reason: str) -> None:
        """Run training steps as a whole on every rank from here on.

        Raises:
            SplitError: the model is not whole here.
        """
        if not self.setup.is_whole():
            raise SplitError(f"{reason} It cannot run as a whole on every rank either, as the model is not whole here.")
        before = self.state
        self.state = replicated = ReplicatedModule(self.setup, self._optimizers, reason, self.watching, self.shards)
        give_back_clipping(self._precision_plugin)
        if isinstance(before, Unpartitioned) and before.optimizer_states is not None:
            replicated.load_optimizer_states(before.optimizer_states)
        if dist.get_rank() == 0 and self.setup.options.gradients.communication.verbose:
            print_replicated(replicated, self.module)
        warn_on_first_rank(replicated.warning())

    def _become_whole(self, partitioned: PartitionedModule, error: SplitError) -> None:
        """Go on with the whole module on every rank, or raise on every rank. Collective."""
        require_whole_possible(error, self.setup)
        self.capture.left.settle()
        gather_in_training(partitioned, self.metrics)
        self.replicate(str(error))

    def close(self, gather: bool) -> None:
        """Give back a whole module (unless it never was), and free what this object holds. Collective if ``gather``."""
        partitioned = self.partitioned
        if self.replicated is not None:
            self.replicated.close()
        for shards in self.shards:
            shards.close()
        if partitioned is not None:
            partitioned.close()
            if not gather:
                leave_in_parts(self.module, BY_EXCEPTION)
            elif not self.setup.options.meta_init:
                self.metrics.share()
                self.capture.left.settle()
                if gather_at_end(partitioned):
                    self.state = WholeAgain(partitioned)
        self.host_values.forget()
        self.metrics.close()
        if self._precision_plugin is not None:
            give_back_clipping(self._precision_plugin)

    # ---- optimizers and precision ----

    def take_optimizers(self, optimizers: Sequence[Any], plugin: Any) -> None:
        """The optimizers that the user built, and the precision plugin; before the first batch."""
        assert isinstance(self.state, Unpartitioned)
        self._optimizers = self.state.optimizers = [_plain(optimizer) for optimizer in optimizers]
        if self.setup.options.shard is not None:
            self.shards = self.state.shards = [OptimizerShards(optimizer) for optimizer in self._optimizers]
        self._precision_plugin = plugin
        take_over_clipping(plugin, self._clip_by_norm)

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        partitioned = self.partitioned
        assert partitioned is not None
        partitioned.clip_by_norm(optimizer, clip_val)

    def deliver(self, factor: float, accumulates: bool) -> None:
        """Set ``.grad`` to what the last :meth:`train` made, times ``factor``. Collective."""
        partitioned = self.partitioned
        assert partitioned is not None
        partitioned.deliver(factor, shares_overflow=self._scaler() is not None and not accumulates)

    def scale(self) -> Scale:
        """What a gradient scaler multiplies losses by."""
        scaler = self._scaler()
        if scaler is None:
            return 1.0
        return scale_of(scaler, self.setup.device)

    def _scaler(self) -> Any:
        scaler = getattr(self._precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            return scaler
        return None

    # ---- state: see `ModuleState` ----

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """The whole module's, on the first rank of the first pipeline; or of each rank what it holds. Collective."""
        self.metrics.share()
        return self.state.state_dict(gather)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a whole module's state: each rank takes what it holds. Names that differ are an error if ``strict``."""
        self.state.load_state_dict(state, strict)

    def optimizer_state(self, optimizer: Any, gather: bool = True) -> dict[str, Any]:
        """The whole optimizer's, on the first rank of the first pipeline; or of each rank its part. Collective."""
        return self.state.optimizer_state(_plain(optimizer), gather)

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of whole optimizers, in the order of ``configure_optimizers``: each rank takes its part."""
        self.state.load_optimizer_states(states)

    def compression_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What compression of gradients remembers, on the first rank. Collective."""
        return self.state.compression_state()

    def load_compression_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on with what compression remembers, as a checkpoint has it; steps that run as a whole do not compress."""
        if isinstance(self.state, Unpartitioned):
            self.state.remembered = state

    def optimized(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameters of all ranks in ``optimizer``."""
        return self.state.optimized(optimizer)

    def nonfinite(self) -> dict[str, str] | None:
        """What is not finite in this rank's gradients, by parameter, before averaging; None if there is none."""
        return self.state.nonfinite()

    def report(self) -> CommunicationReport | None:
        """What averaging over replicas cost. Collective over the replicas."""
        return self.state.report()

    def plan_decision(self) -> Mapping[str, Any] | None:
        """What a resumed run has to know in order to have the same stages."""
        partitioned = self.partitioned
        if partitioned is None:
            return self.known_plan
        return partitioned.plan.decision


def _plain(optimizer: Any) -> Any:
    """The user's optimizer where Lightning has wrapped it."""
    return getattr(optimizer, "optimizer", optimizer)
