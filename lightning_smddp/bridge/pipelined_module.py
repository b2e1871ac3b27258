"""A LightningModule on the ranks of a pipeline, in whatever state: from its first batch to the end of a run.

The first training batch partitions it; see ``partitioned_module.py``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp.bridge.batches import Batches, MicroBatcher
from lightning_smddp.bridge.loss_weights import find_loss_weight
from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.partitioned_module import (
    PartitionedModule,
    RunSetup,
    Unpartitioned,
    warn_on_first_rank,
)
from lightning_smddp.bridge.partitioning import Partitioning
from lightning_smddp.bridge.step import LightningStep, Scale
from lightning_smddp.bridge.step_record import StepRecorder
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.batch_sync import BatchSync
from lightning_smddp.pipeline.partition.costs import fits_on_devices, fits_on_hosts
from lightning_smddp.pipeline.partition.loss_weights import COUNTED_BY_ROWS, LossWeight, has_ignored
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import own_error
from lightning_smddp.pipeline.state.gradients import give_back_clipping, take_over_clipping
from lightning_smddp.pipeline.state.state_dict import unshard
from lightning_smddp.sharding.optimizer_shards import OptimizerShards
from lightning_smddp.wire.pytree import tensors
from lightning_smddp.wire.stream import CPU
from lightning_smddp.wording import USE_INSTEAD

Show: TypeAlias = Callable[[str, PartitionedModule, Sequence[MicroBatch], LossWeight], None]


BY_EXCEPTION = "an exception ended the run that had divided it, and other ranks may have been gone"
BY_MEMORY = "a host of the run that had divided it had too little memory for the whole of it on each of its ranks"


class PipelinedModule:
    """Runs a LightningModule's steps, and holds what is the same in all its states.

    Args:
        setup: of the run.
        show: called with what the module was partitioned by: a step's name, the partitioned module, the micro-batches
            of the first batch, and how they count.

    Attributes:
        state: what the module is now.
        known_plan: the decision of the run that is resumed, which has the same stages then.
        watching: whether gradients are watched for NaN and inf.
        marking: see ``NonFiniteWatch.marks``.
        shards: of the optimizers; empty without ``shard="optimizer"``.
    """

    def __init__(self, setup: RunSetup, show: Show) -> None:
        self.setup = setup
        self.module = module = setup.module
        self._show = show
        self.state: Unpartitioned | PartitionedModule = Unpartitioned(setup)
        self.known_plan: Mapping[str, Any] | None = None
        self.watching = False
        self.marking = True
        self.sync = BatchSync(setup.groups.host, setup.device)
        replicas = setup.groups.data_parallel_group if setup.num_replicas > 1 else None
        self.metrics = PipelineMetrics(module, setup.groups.pipeline, setup.last_rank, setup.device, replicas)
        self.recorder = StepRecorder(module, self.metrics, warn_on_first_rank)
        self.batcher = MicroBatcher(setup, self.sync)
        self._batches = Batches(setup, self.batcher, self.recorder, self.sync)
        self._share = 1.0  # of the last training batch, see `StepResults`
        self.shards: list[OptimizerShards] = []
        self._precision_plugin: Any = None

    @property
    def partitioned(self) -> PartitionedModule | None:
        """The module with its stages, while it has some."""
        return self.state if isinstance(self.state, PartitionedModule) else None

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

        None where it returned None for all micro-batches: then nothing follows. If it did so for some, they do not
        count.

        Args:
            batch: as Lightning gives it.
            arguments: the step's others.
            scale: the loss is multiplied by it before backward.
            continues: gradients are added to those of the batch before.
            may_drop: what is in ``.grad`` now will be zeroed before anybody reads it.
            accumulates: no optimizer step follows.

        Raises:
            ValueError: on every rank: the step returned None where that cannot be made up for.
        """
        batch = self.sync.same(batch, "training_step")
        step = self._begin_step("training_step", arguments, scale)
        if isinstance(self.state, Unpartitioned):
            self._partition(self.state, step, batch)
        partitioned = self.partitioned
        assert partitioned is not None
        begin = functools.partial(partitioned.stash.begin, continues, may_drop, accumulates)
        results = self._batches.train(partitioned, step, batch, begin)
        self._share = results.share
        if results.share < 1.0 and (partitioned.replicas is not None or (continues and results.output is not None)):
            raise ValueError(
                f"`training_step` returned None for micro-batches in step {self.module.global_step}. Where gradients "
                "are averaged over replicas, or added to those of the batch before (accumulate_grad_batches), that "
                "cannot be made up for: return a loss of zero that depends on the output, such as `0.0 * output.sum()`."
            )
        return results.output

    def evaluate(self, hook: str, batch: Any, arguments: Sequence[Any], may_wait: bool) -> Any:
        """One batch forward; what the step returns for the whole of it, on every rank.

        Args:
            hook: name of the step.
            batch: as Lightning gives it.
            arguments: the step's others.
            may_wait: training follows, so there is no need to partition the module by this step.
        """
        batch = self.sync.same(batch, hook)
        step = self._begin_step(hook, arguments)
        if isinstance(self.state, Unpartitioned):
            waits = may_wait and self.setup.is_whole()
            if waits or not self._is_partitioned_by(self.state, step, batch):
                with step.precision():  # Lightning sees all that it does
                    return getattr(self.module, hook)(batch, *step.arguments)
        partitioned = self.partitioned
        assert partitioned is not None
        return self._batches.evaluate(partitioned, step, batch)

    def _is_partitioned_by(self, before: Unpartitioned, step: LightningStep, batch: Any) -> bool:
        """Partition the module by an evaluation step; False if that cannot be pipelined. Collective."""
        if self._batches.is_in_lockstep(step):
            return False
        try:
            self._partition(before, step, batch)
        except SplitError as error:
            if not self.setup.is_whole():
                raise own_error(error) from None
            self._batches.keep_in_lockstep(step, own_error(error))
            return False
        return True

    def _begin_step(self, hook: str, arguments: Sequence[Any], scale: Scale = 1.0) -> LightningStep:
        context = functools.partial(self.setup.step_context, hook)
        return LightningStep(self.module, hook, arguments, context, self.recorder, scale)

    # ---- from one state to another ----

    def _partition(self, before: Unpartitioned, step: LightningStep, batch: Any) -> None:
        """Find stages, and let go of other ranks' parameters. Collective over all ranks.

        Raises:
            SplitError, VerificationError: on every rank: the step cannot be pipelined.
        """
        microbatches = self.batcher.split(batch, step)
        try:
            partitioned = Partitioning(before, step, microbatches, self.known_plan).run()
        except SplitError as error:
            if not step.trains:
                raise
            cause = own_error(error)
            if isinstance(cause, SplitError):
                cause = SplitError(f"{cause} {USE_INSTEAD}")
            raise cause from None
        self.state = partitioned
        if partitioned.replicas is not None:
            partitioned.replicas.watching = self.watching
            partitioned.replicas.marking = self.marking
        self._choose_loss_weight(partitioned, step, batch, microbatches)
        self._show(step.hook, partitioned, microbatches, self.batcher.loss_weight(batch, step))

    def _choose_loss_weight(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        batch: Any,
        microbatches: Sequence[MicroBatch],
    ) -> None:
        """With ``loss_weight="auto"``: as in the run that is resumed, else by the trial. Collective over all ranks."""
        if self.setup.options.loss_weight != "auto" or self.batcher.chosen is not None:
            return
        if not step.trains:
            if step.hook != "predict_step" and any(has_ignored(tensor) for tensor in tensors(batch)):
                partitioned.notes.append(("note", COUNTED_BY_ROWS))
            return
        kept = partitioned.plan.decision.get("loss_weight")
        if kept is not None:
            self.batcher.chosen = LossWeight.from_json(kept)
        elif len(microbatches) > 1:
            whole = self.batcher.splitter.whole(batch)
            self.batcher.chosen, note = find_loss_weight(partitioned, step, whole, microbatches)
            if note is not None:
                partitioned.notes.append(("note", note))

    def close(self, gather: bool) -> None:
        """Give back a whole module (unless it never was), and free what this object holds. Collective if ``gather``."""
        partitioned = self.partitioned
        for shards in self.shards:
            shards.close()
        if partitioned is not None:
            partitioned.close()
            if not gather:
                leave_in_parts(self.module, BY_EXCEPTION)
            elif not self.setup.options.meta_init:
                self.metrics.share()
                self._gather_on_hosts(partitioned)
        self.sync.on_host = None
        self.metrics.close()
        if self._precision_plugin is not None:
            give_back_clipping(self._precision_plugin)

    def _gather_on_hosts(self, partitioned: PartitionedModule) -> None:
        """Give every rank the whole module on its host, where it goes after a run in any case. Collective.

        If a host lacks memory for that the parts stay on their ranks, with a warning.
        """
        setup, module = self.setup, self.module
        if fits_on_hosts(module, setup.world):
            partitioned.view.close()
            unshard(module, partitioned.plan.ownership, setup.groups.pipeline, setup.device, to=CPU)
            partitioned.is_gathered = True
            return
        leave_in_parts(module, BY_MEMORY)
        warn_on_first_rank(f"{type(module).__name__} stays in parts, each on its rank: {BY_MEMORY}.")

    # ---- optimizers and precision ----

    def take_optimizers(self, optimizers: Sequence[Any], plugin: Any) -> None:
        """The optimizers that the user built, and the precision plugin; before the first batch."""
        assert isinstance(self.state, Unpartitioned)
        self.state.optimizers = list(optimizers)
        if self.setup.options.shard is not None:
            self.shards = self.state.shards = [OptimizerShards(optimizer) for optimizer in optimizers]
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
        factor /= self._share  # of a mean over those micro-batches that count
        partitioned.deliver(factor, shares_overflow=self._scaler() is not None and not accumulates)

    def scale(self) -> Scale:
        """What a gradient scaler multiplies losses by; on a device it stays there, as reading it waits."""
        scaler = self._scaler()
        if scaler is None:
            return 1.0
        if self.setup.device.type == "cpu":
            return float(scaler.get_scale())
        scale: Tensor = scaler.scale(torch.ones((), device=self.setup.device))
        return scale

    def _scaler(self) -> Any:
        scaler = getattr(self._precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            return scaler
        return None

    # ---- state: the rest is `ModuleState`'s ----

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """The whole module's, on the first rank of the first pipeline; or of each rank what it holds. Collective."""
        self.metrics.share()
        return self.state.state_dict(gather)

    def plan_decision(self) -> Mapping[str, Any] | None:
        """What a resumed run has to know in order to have the same stages."""
        partitioned = self.partitioned
        if partitioned is None:
            return self.known_plan
        decision = dict(partitioned.plan.decision)
        if self.batcher.chosen is not None:
            decision["loss_weight"] = self.batcher.chosen.to_json()
        return decision


_in_parts: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # why


def leave_in_parts(module: nn.Module, reason: str) -> None:
    """Remember that this rank has its own stages of ``module`` only."""
    _in_parts[module] = reason


def require_whole(module: nn.Module) -> None:
    """Raise ``ValueError`` if an earlier run has left ``module`` in parts, of which this rank has its own."""
    if module in _in_parts and any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} is in parts: {_in_parts[module]}, so that this rank has its own stages only. "
            "Make a new module, and give `fit` the last checkpoint as `ckpt_path`."
        )
