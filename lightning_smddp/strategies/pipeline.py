"""``Trainer(strategy="smddp_pipeline")``: pipeline parallelism of the module's own ``training_step``.

The first batch is traced and cut by ``bridge/partitioning.py``. The Trainer's calls of ``training_step``, ``backward``
and others leave the hooks' view of the module by ``hook_view.py``. A micro-batch's way, downward:
``bridge/pipelined_module.py`` (one batch, which ``batches.py`` cuts; ``pipeline/runtime/trace_cache.py`` finds each
micro-batch's path), ``pipeline/runtime/engine.py`` (one run of its micro-batches, by torch's schedule), ``stage.py``
(one stage's forward, backward and messages), ``step_run.py`` (its part of the step), ``bridge/step.py`` (the user's
``training_step``).
``pipeline/state/gradients.py`` takes gradients away, and puts them into ``.grad`` when Lightning calls ``backward``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_smddp._compat.trainer import around_hooks, keeps_user_samplers, require_hooks_found
from lightning_smddp.bridge.loss_weights import LossWeight
from lightning_smddp.bridge.partitioned_module import PartitionedModule, RunSetup
from lightning_smddp.bridge.pipelined_module import PipelinedModule, require_whole
from lightning_smddp.communication.consistency import require_initialized
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.nonfinite import NonFinite
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.activations import CHANGES_NOTHING
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.mesh import Groups
from lightning_smddp.pipeline.partition.costs import best_share
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, looks_at_other_rows
from lightning_smddp.pipeline.runtime.schedules import parse
from lightning_smddp.pipeline.state.gradients import connected, factor_of
from lightning_smddp.pipeline.state.state_dict import broadcast_initial, load_full_state_dict
from lightning_smddp.sharding.optimizer_shards import around_step, unwrapped
from lightning_smddp.strategies.checks import (
    arrives_as_expected,
    callbacks_of,
    has_changed,
    may_have_changed_gradients,
    refuse_training,
    require_batches,
    zeroes_as_usual,
)
from lightning_smddp.strategies.hook_view import HookView, let_hooks_call
from lightning_smddp.strategies.nonfinite import by_asking
from lightning_smddp.strategies.options import (
    CommunicationOptions,
    LossWeightOption,
    OfPipeline,
    PartitionOptions,
    PipelineOptions,
    ReliabilityOptions,
    StrategyOptions,
    by_name,
    group_of,
    popped,
)
from lightning_smddp.strategies.pipeline_ranks import PipelineRanks
from lightning_smddp.strategies.tables import print_table
from lightning_smddp.wording import counted

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class PipelineParallel(PipelineRanks):
    """Pipeline parallelism of any LightningModule, split automatically, with data parallelism over the other ranks.

    The first batch shows how the step uses the module's submodules. The step is then cut into stages; each rank
    keeps the parameters of its own, and runs the step's own code on one micro-batch after the other.

    Args:
        *args: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io`` and
            ``precision_plugin``, as of ``DDPStrategy``.
        pipeline_parallel_size: ranks of a pipeline; None for all. The rest of the world are replicas.
        num_microbatches: in how many parts a batch goes through the pipeline; ``"auto"`` is up to four for each rank.
            Parts may differ in size.
        loss_weight: how much a part counts in the loss, and in means that are logged: ``"auto"`` (found out on the
            first batch), ``"rows"``, ``"labels"`` (those that are not -100), ``"shifted_labels"`` (without the first
            column), ``"sum"`` (losses are added), the name of a batch entry (its sum), or a function of the part.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"``, ``"looped_bfs"``,
            ``"interleaved_zero_bubble"``, ``"zbv_zero_bubble"``, ``"dualpipev"``.
        split: names of the modules that the stages, but the first, begin with; None finds the best ones.
        partition: how the module and batches are divided, in more detail.
        communication, reliability: as of ``SMDDPStrategy``.
        **kwargs: ``activation_checkpointing``: True keeps only the inputs of modules for backward, and runs them again
            in it; ``"offload"`` keeps what is in between in the host's memory, on devices;
            ``meta_init``: layers made in ``configure_model`` get no memory until it is known which rank keeps them,
            their first values come from ``reset_parameters``, the same for any number of ranks. As of
            ``SMDDPStrategy``: ``algorithm``, ``compression`` and ``bucket_cap_mb``, of the gradients of replicas,
            ``resume``, and ``shard``: the replicas of a stage share its optimizer. Of ``DDPStrategy``: the five above,
            ``process_group_backend``, ``timeout``, ``start_method``.

    Raises:
        TypeError: an argument is unknown, or belongs into a group of options; the message says what to write.
        ValueError: an argument is not one of the valid values; the message lists them.
    """

    _averages_over_batches = False  # but over micro-batches, by `loss_weight`
    _is_divided = True
    _pipelined: PipelinedModule | None = None
    _ended: PipelinedModule | None = None  # that of the last run: checkpoints can be saved after it

    _is_shown = False  # how the module was partitioned
    _accumulates = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        let_hooks_call(cls)

    def __init__(
        self,
        *args: Any,
        pipeline_parallel_size: int | None = None,
        num_microbatches: int | Literal["auto"] = "auto",
        loss_weight: LossWeightOption = "auto",
        schedule: str = "1f1b",
        split: Sequence[str] | None = None,
        partition: PartitionOptions = PartitionOptions(),
        communication: CommunicationOptions = CommunicationOptions(),
        reliability: ReliabilityOptions = ReliabilityOptions(),
        **kwargs: Unpack[OfPipeline],
    ) -> None:
        given = by_name(self, super().__init__, args, kwargs, OfPipeline.__annotations__)
        memory = popped(given, "activation_checkpointing", "meta_init")
        of_all = popped(given, "algorithm", "compression", "bucket_cap_mb", "resume", "shard")
        options = StrategyOptions.of(communication, reliability, **of_all)
        self.options = PipelineOptions(
            pipeline_parallel_size=pipeline_parallel_size,
            num_microbatches=None if num_microbatches == "auto" else num_microbatches,
            loss_weight=loss_weight,
            schedule=parse(schedule),
            split=split,
            partition=group_of(PartitionOptions, partition),
            strategy=options,
            **memory,
        )
        super().__init__(**given)
        self._hold_parts(options)
        self._meta_init = self.options.meta_init
        self._hook_view = HookView(self)

    # ---- start and end ----

    def _require_layout(self) -> None:
        self._grid = self.options.grid(self.num_nodes * self.num_processes)

    def _make_groups(self) -> None:
        if self._groups is None:  # a second run has the ranks of the first one
            self._groups = Groups.create(self._grid, self._limit, self.root_device)

    def _set_up_model(self, trainer: Trainer) -> None:
        """Take the module as it is; it is partitioned at the first batch."""
        module, is_fit = self._module, trainer.state.fn == "fit"
        trainer.accelerator.setup(trainer)
        # Lightning takes every rank for a replica. With one replica all ranks have the same data: no sampler is needed,
        # and what ranks log is equal without `sync_dist`.
        one_replica = self._connected.mesh.num_replicas == 1
        if one_replica:
            self._changes.enter_context(keeps_user_samplers(trainer))
            self._changes.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "It is recommended to use `self.log")
        require_whole(module)
        require_initialized(module)
        require_batches(module)
        if is_fit and self._layer_sync and not one_replica:
            torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group=self._connected.data_parallel_group)
        self.precision_plugin.convert_module(module)
        # What no rank has values of yet, with `meta_init`, gets them from a seed when it is known who keeps it.
        broadcast_initial(module, world(), device=self.root_device)
        device, options = self.root_device, self.options
        setup = RunSetup(module, options, self._connected, device, self._step_context, self._limit, self._checks)
        self._pipelined = PipelinedModule(setup, self._show_partition)
        if self._ended is not None and self._ended.module is module:
            self._pipelined.batcher.chosen = self._ended.batcher.chosen
        self.model_to_device()
        if is_fit:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # Optimizers are made of the whole module, as the user wrote it. When the first batch has shown who keeps what,
        # each steps the parameters of this rank.
        if is_fit:
            refuse_training(module, callbacks_of(trainer), self.optimizers)
            self._pipelined.take_optimizer(unwrapped(self.optimizers[0]), self.precision_plugin)
        self._changes.enter_context(around_hooks(trainer, self._hook_view.around))

    def _stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        return around_step(() if self._pipelined is None else self._pipelined.steps)

    def _show_partition(self, hook: str, *found: Any) -> None:
        """Print how the module was partitioned: for training, and for evaluation where nothing was printed yet."""
        is_wanted = hook == "training_step" or not self._is_shown
        self._is_shown = True
        if is_wanted and self._speaks:
            _print_partition(hook, *found)

    @override
    def model_to_device(self) -> None:
        """Move what is not partitioned yet, if there is room."""
        self._last_pipelined().to_device()

    def _epoch_ends(self) -> None:
        self._hook_view.settle()

    def _release_model(self) -> None:
        """Give back a whole module, and free groups and memory."""
        # After an exception other ranks may be gone: nothing is gathered, and nobody is waited for.
        if self._pipelined is not None:
            if not self._interrupted:
                self._last_report = self._pipelined.state.report() or self._last_report
            self._pipelined.close(gather=not self._interrupted)
            self._ended, self._pipelined = self._pipelined, None

    def _tear_down_model(self) -> None:
        # Lightning moves what it finds here to the CPU, which tensors without memory cannot do: the module is out of
        # sight meanwhile.
        module = self._lightning_module
        is_away = module is not None and any(parameter.is_meta for parameter in module.parameters())
        with patched([(vars(self), "_lightning_module", None if is_away else module)]):
            super()._tear_down_model()

    # ---- steps ----

    def _moves_batch(self, batch: Any) -> None:
        """Note what the host knows of the batch; not of what a hook of the user's makes of it."""
        on_host = self.root_device.type == "cpu"  # where the batch itself can be read
        if self._pipelined is None or on_host:
            return
        if not has_changed(self._trainer, "transfer_batch_to_device", "on_after_batch_transfer"):
            self._pipelined.sync.note(batch)

    def _step(self, hook: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One batch through the pipeline; evaluation is forward only, and its results are on every rank."""
        pipelined = self._last_pipelined()
        require_hooks_found(self._trainer)
        batch, *rest = [*args, *kwargs.values()]
        if hook == "training_step":
            return self._train(pipelined, batch, rest)
        return pipelined.evaluate(hook, batch, rest, may_wait=self._trainer.state.fn == "fit")

    def _train(self, pipelined: PipelinedModule, batch: Any, rest: list[Any]) -> Any:
        """Forward and backward of all micro-batches; the gradients are handed over in ``backward``."""
        trainer = self._trainer
        # Gradients exist when this returns, computed with the factor that Lightning's backward is expected to bring
        # (loss scale / accumulated batches). They are kept aside until that backward reaches `deliver`, which corrects
        # them by the factor that did arrive.
        expected = pipelined.scale() / trainer.accumulate_grad_batches
        accumulates = self._accumulates
        continues = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches != 0
        output = pipelined.train(batch, rest, expected, continues, zeroes_as_usual(trainer), accumulates)
        if output is None:
            # Lightning asks for `trainer.world_size`, and skips it if that is 1: `PipelineRanks` answers with replicas.
            self._skips = True
            return None

        def deliver(arrived: Tensor) -> None:
            factor = 1.0
            if not (arrived.is_cuda and arrives_as_expected(trainer)):  # reading it would make the host wait
                factor = factor_of(arrived, expected)
            pipelined.deliver(factor)

        # What Lightning gets is the loss with a graph of its own, whose backward calls `deliver`.
        if isinstance(output, dict):
            return {**output, "loss": connected(output["loss"], deliver)}
        return connected(output, deliver)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Lightning enters it around batches that only accumulate."""
        return patched([(vars(self), "_accumulates", True)])

    def _find_nonfinite(self, optimizer: Optimizer) -> NonFinite | None:
        partitioned = self._last_pipelined().partitioned
        assert partitioned is not None
        found = partitioned.nonfinite(may_have_changed_gradients(self._trainer))
        of_stage = self._nonfinite_group is self._connected.data_parallel_group
        return found if of_stage else by_asking(found, self.root_device)

    @property
    def _nonfinite_group(self) -> dist.ProcessGroup:
        """Those of one stage: the others hear by the supervision, as asking them in each step costs more than looking.

        They may have taken the step by then; nothing is saved after it.
        """
        if self._reliability.on_nonfinite != "error" or self._supervision.supervisor is None:
            return world()
        return self._connected.data_parallel_group

    def _require_outside_of_step(self) -> None:
        """Raises ``ValueError`` inside of a step, whose micro-batches reach each rank in turn."""
        if self._in_step:
            raise SplitError(
                "`strategy.barrier()` is called inside of a step that runs as a pipeline: each rank is at another "
                "micro-batch. Call it in a hook such as `on_train_batch_start`."
            )

    # ---- checkpoints: each rank has a part of the module and of the optimizers' states ----

    def _model_state(self) -> dict[str, Any]:
        return self._last_pipelined().state_dict(gather=not self._reliability.sharded)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._last_pipelined().state.optimizer_state(gather=not self._reliability.sharded)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a checkpoint of the whole module; what has no memory yet gets its values when it does."""
        if self._pipelined is None:  # before setup
            load_full_state_dict(self._module, checkpoint["state_dict"], strict)
        else:
            self._pipelined.state.load_state_dict(checkpoint["state_dict"], strict)

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states of the whole module."""
        # To go on exactly the stages have to be cut as they were.
        pipelined = self._last_pipelined()
        pipelined.known_plan = self._exact_resume.saved("division")
        pipelined.state.load_optimizer_state(checkpoint["optimizer_states"][0])

    def _decisions(self) -> Mapping[str, Any]:
        return {"division": self._last_pipelined().plan_decision()}

    def _last_pipelined(self) -> PipelinedModule:
        """That of the run; afterwards that of the last run, as checkpoints can be saved then too."""
        pipelined = self._pipelined or self._ended
        assert pipelined is not None, "setup() comes first"
        return pipelined

    # ---- what users see ----

    @property
    def communication_report(self) -> CommunicationReport | None:
        """What averaging over replicas cost so far; None with one replica. Collective over the replicas."""
        return self._last_report if self._pipelined is None else self._pipelined.state.report()


# ---- the table at the start ----


def _print_partition(
    hook: str, partitioned: PartitionedModule, microbatches: Sequence[MicroBatch], loss_weight: LossWeight
) -> None:
    """Print how the module was partitioned for the step ``hook``; ``loss_weight`` is of the micro-batches."""
    setup = partitioned.setup
    stages = f"pipelined in {counted(setup.num_stages, 'stage')}"
    if setup.num_stages == 1:
        stages = "1 stage is no pipeline: use more devices, or another pipeline_parallel_size"
    rows = [
        (hook, stages),
        ("schedule", _schedule(partitioned, microbatches)),
        ("loss weights", loss_weight.describe()),
        *_stages(partitioned),
        *(("note", note) for note in _notes(partitioned, len(microbatches))),
    ]
    if partitioned.sharded is not None:
        rows += partitioned.sharded.describe()
    print_table("smddp_pipeline: pipeline parallelism", rows, setup.module.trainer)


def _schedule(partitioned: PartitionedModule, microbatches: Sequence[MicroBatch]) -> str:
    schedule = partitioned.setup.options.schedule
    sizes = sorted({microbatch.size for microbatch in microbatches}, reverse=True)
    rows = " or ".join(counted(size, "row") for size in sizes)
    count = counted(len(microbatches), "micro-batch")
    share = best_share(schedule, partitioned.plan.cluster.rank_of_stage, len(microbatches))
    return f"{schedule.name}, {count} of {rows}; ranks compute {share:.0%} of the time at best"


def _stages(partitioned: PartitionedModule) -> Iterator[tuple[str, str]]:
    """A row for each stage, in the order of the model."""
    plan = partitioned.plan
    seconds, memory = plan.decision["stage_seconds"], plan.decision["stage_memory"]
    for stage in plan.stages:
        number = stage.stage
        modules = [node.module for node in plan.graph.nodes[stage.begin : stage.end] if node.module is not None]
        span = " .. ".join(dict.fromkeys([modules[0], modules[-1]])) if modules else "no module"
        share = seconds[number] / (sum(seconds) or 1.0)
        text = f"{span}: {share:.0%} of the time, {memory[number] / 2**20:.1f} MiB"
        yield f"stage {number} on rank {plan.cluster.rank_of_stage[number]}", text


def _notes(partitioned: PartitionedModule, num_microbatches: int) -> Iterator[str]:
    yield from partitioned.notes
    if partitioned.setup.checkpointing != partitioned.setup.options.activation_checkpointing:
        yield CHANGES_NOTHING
    norms = looks_at_other_rows(partitioned.setup.module)
    counts = partitioned.recorder.scopes.counts
    if norms and num_microbatches > 1:
        yield f"in training {norms[0]} (BatchNorm) sees the rows of a micro-batch, not of the batch"
    if counts and num_microbatches > 1:
        yield f"{', '.join(counts)} moves once per micro-batch; self.global_step once per batch"
