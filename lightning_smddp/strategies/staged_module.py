"""A LightningModule divided among the ranks of a pipeline, and its steps. From its first batch to the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.broadcast import HeaderCache, broadcast_structure
from lightning_smddp.pipeline.clipping import clip_by_norm, share_overflow
from lightning_smddp.pipeline.division import CHECK_SEED, Division, Trial, divide, record, require_same
from lightning_smddp.pipeline.full_state import full_state_dict, gather_full, load_full_state_dict, release
from lightning_smddp.pipeline.gradient_window import GradientWindow
from lightning_smddp.pipeline.materialise import materialise
from lightning_smddp.pipeline.microbatches import MicroBatch, split
from lightning_smddp.pipeline.optimizer_state import OptimizerPartition
from lightning_smddp.pipeline.ownership import held_parameters
from lightning_smddp.pipeline.placement import Groups
from lightning_smddp.pipeline.program import Modules, build_program
from lightning_smddp.pipeline.reference import seeding
from lightning_smddp.pipeline.replicas import ReplicaGradients
from lightning_smddp.pipeline.runtime import PipelineRuntime, StagedStep
from lightning_smddp.pipeline.spans import Recorder
from lightning_smddp.pipeline.splitting import Splitting, follow, is_within
from lightning_smddp.pipeline.tied import TiedGradients, create_tied_groups
from lightning_smddp.pipeline.untouched import untouched
from lightning_smddp.pipeline.verification import EXACT, MIXED, Finding, compare, gradient_norms, require_equal
from lightning_smddp.communication.messages import gather_json
from lightning_smddp.strategies.division_table import describe, resources_for
from lightning_smddp.strategies.hand_over import factor_of
from lightning_smddp.strategies.pipeline_metrics import PipelineMetrics
from lightning_smddp.strategies.pipeline_options import PipelineOptions
from lightning_smddp.strategies.pipeline_step import LightningStep, loss_of
from lightning_smddp.strategies.step_capture import StepCapture
from lightning_smddp.strategies.step_results import broadcast_results
from lightning_smddp.strategies.tables import print_table

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_TITLE = "smddp_pipeline: pipeline parallelism"


class StagedModule:
    """See the module's docstring.

    Args:
        module: the user's.
        options: the strategy's.
        groups: this rank's place.
        device: of this rank.
        context: for a step's name, what Lightning enters around it.
        timeout: of collectives.
    """

    def __init__(
        self,
        module: LightningModule,
        options: PipelineOptions,
        groups: Groups,
        device: torch.device,
        context: Callable[[str], AbstractContextManager[Any]],
        timeout: timedelta,
    ) -> None:
        self.module, self.options, self.groups, self.device = module, options, groups, device
        self.context, self.timeout = context, timeout
        size = groups.pipeline.size()
        self.num_stages = size * options.stages_per_rank
        self.rank_of_stage = options.schedule.rank_of_stage(self.num_stages, size)
        self.last_rank = self.rank_of_stage[-1]
        replicas = groups.replicas if groups.grid.num_replicas > 1 else None
        self.metrics = PipelineMetrics(module, groups.pipeline, self.last_rank, device, replicas)
        self.capture = StepCapture(module, metrics=self.metrics)
        self.recorder: Recorder | None = None
        self.division: Division | None = None
        self.findings: list[Finding] = []
        self._runtime: PipelineRuntime | None = None
        self._steps: dict[Any, StagedStep] = {}
        self._caches: dict[Any, HeaderCache] = {}
        self._window: GradientWindow | None = None
        self._replicas: ReplicaGradients | None = None
        self._optimizers: list[Optimizer] = []
        self._partitions: list[OptimizerPartition] = []
        self._states: Sequence[Mapping[str, Any]] | None = None
        self._weights: Mapping[str, Any] | None = None
        self._plugin: Any = None

    def to_device(self) -> None:
        """Move the module to the device if it has memory and fits as a whole; else its parts go when it is divided."""
        if any(p.is_meta for p in self.module.parameters()):
            return
        if self.device.type == "cuda":
            size = sum(p.numel() * p.dtype.itemsize for p in self.module.parameters())
            free, _ = torch.cuda.mem_get_info(self.device)
            if 2 * size > free:  # the trace, and the gradients of its last modules, need room too
                return
        self.module.to(self.device)

    # ---- steps ----

    def train(
        self, batch: Any, arguments: Sequence[Any], scale: float, continues: bool, may_drop: bool, accumulates: bool
    ) -> Any:
        """Forward and backward of a batch; what the step returns for the whole of it, on every rank."""
        batch = self._agreed(batch, "training_step")
        microbatches = self._microbatches(batch)
        step = self._step("training_step", arguments, scale)
        if self.division is None:
            self._divide(step, microbatches)
        staged = self._staged(step, microbatches[0], train=True)
        assert self._window is not None
        self._window.begin(len(microbatches), continues, may_drop, accumulates)
        outputs = self._run(staged, step, microbatches, train=True)
        self._window.set_aside()
        return self._share(step, outputs, batch)

    def deliver(self, arrived: Tensor, expected: float, accumulates: bool) -> None:
        """Set ``.grad`` to what the last :meth:`train` made. Collective."""
        assert self._window is not None
        self._window.deliver(factor_of(arrived, expected))
        for partition in self._partitions:
            partition.refresh()
            if self._scaler() is not None and not accumulates:
                placeholder = partition.add_placeholder(self.device)
                share_overflow(partition.parameters, placeholder, self.groups.pipeline)

    def evaluate(self, hook: str, batch: Any, arguments: Sequence[Any], may_wait: bool) -> Any:
        """One batch forward; what the step returns for the whole of it, on every rank.

        Args:
            hook: name of the step.
            batch: as Lightning gives it.
            arguments: the step's others.
            may_wait: training follows, so there is no need to divide the module by this step.
        """
        batch = self._agreed(batch, hook)
        step = self._step(hook, arguments)
        if self.division is None and may_wait and self._is_whole():
            with self.context(hook):
                return getattr(self.module, hook)(batch, *arguments)
        microbatches = self._microbatches(batch)
        if self.division is None:
            self._divide(step, microbatches)
        staged = self._staged(step, microbatches[0], train=False)
        return self._share(step, self._run(staged, step, microbatches, train=False), batch)

    def scale(self) -> float:
        """What a gradient scaler multiplies losses by."""
        scaler = self._scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _scaler(self) -> Any:
        scaler = getattr(self._plugin, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _step(self, hook: str, arguments: Sequence[Any], scale: float = 1.0) -> LightningStep:
        return LightningStep(self.module, hook, arguments, lambda: self.context(hook), self.capture, scale)

    def _agreed(self, batch: Any, hook: str) -> Any:
        """The batch of the pipeline's first rank: samplers, streams and augmentation may differ on the others."""
        cache = self._caches.setdefault(("batch", hook), HeaderCache())
        return broadcast_structure(batch, self.groups.pipeline, 0, self.device, cache=cache, like=batch)

    def _microbatches(self, batch: Any) -> list[MicroBatch]:
        size = None if self.options.batch_size_fn is None else self.options.batch_size_fn(batch)
        count = self.options.num_microbatches
        if count is None:
            rows = split(batch, 1, size)[0].size
            ranks = self.groups.pipeline.size()
            count = min(rows, 4 * ranks)
        return split(batch, count, size)

    def _run(self, staged: StagedStep, step: LightningStep, microbatches: Sequence[MicroBatch], train: bool) -> list[Any]:
        """All micro-batches, in as many rounds as ``active_microbatches`` asks for."""
        assert self._runtime is not None
        size = self.options.active_microbatches or len(microbatches)
        outputs: list[Any] = []
        for begin in range(0, len(microbatches), size):
            step.offset = begin
            outputs += self._runtime.run(staged, step, microbatches[begin : begin + size], train)
        return outputs

    def _share(self, step: LightningStep, outputs: list[Any], batch: Any) -> Any:
        """Combine what the micro-batches gave where the step ends, and apply it on every rank."""
        assert self._runtime is not None
        results = self.capture.results(outputs) if self._runtime.ends_here else None
        cache = self._caches.setdefault((step.hook, step.arguments[1:]), HeaderCache())
        results = broadcast_results(results, self.groups.pipeline, self.last_rank, self.device, cache, like=batch)
        return results.apply(self.module, self.metrics)

    # ---- division ----

    def _is_whole(self) -> bool:
        return all(p.device.type == self.device.type for p in self.module.parameters())

    def _divide(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> None:
        """Find stages, let go of other ranks' parameters, and connect what depends on it. Collective over all ranks."""
        world = dist.group.WORLD
        assert world is not None
        trains = step.hook == "training_step"
        resources = resources_for(self.module, self.options, self._optimizers, self.rank_of_stage, len(microbatches))
        first, last = microbatches[0], microbatches[-1]
        trial = Trial(step.alone(last), step.alone(first), lambda result: loss_of(result) if trains else None)
        with torch.set_grad_enabled(trains):
            self.division = divide(
                trial,
                self.module,
                self.device,
                world,
                resources,
                self.options.split,
                self.options.activation_checkpointing,
                with_reference=self._is_whole(),
            )
        self._place(self.division)
        self._connect(self.division)
        staged = self._runtime.stage(self.division.program, self.division.splitting) if self._runtime else None
        assert staged is not None
        self._steps[self._key(step)] = staged
        self._runtime.remember(staged, last, trains) if self._runtime else None
        if trains and self.options.check and self.division.reference is not None:
            self._check(staged, step, first)
        if self.options.communication.verbose and dist.get_rank() == 0:
            print_table(_TITLE, describe(self.division, self.options, resources, self.module, microbatches))

    def _place(self, division: Division) -> None:
        rank = self.groups.place
        held = division.ownership.held_by(rank)
        if not self._is_whole():
            materialise(self.module, held, self.device, int(torch.initial_seed()) % 2**31)
        release(self.module, division.ownership, rank)
        if self._weights is not None:
            load_full_state_dict(self.module, self._weights)
            self._weights = None

    def _connect(self, division: Division) -> None:
        """Everything that depends on who holds what. Collective over all ranks."""
        rank, schedule = self.groups.place, self.options.schedule
        held = held_parameters(self.module, division.ownership, rank)
        here = [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]
        tied_groups = create_tied_groups(division.ownership, self.groups.grid.pipelines, self.timeout)
        tied = TiedGradients(self.module, division.ownership, rank, tied_groups)
        if self.groups.grid.num_replicas > 1 and self._optimizers:
            communication = self.options.communication
            self._replicas = ReplicaGradients(
                held,
                self.groups.replicas,
                self.device,
                self.timeout,
                communication.algorithm,
                communication.compression,
                communication.bucket_cap_mb,
                communication.tuning_cache,
            )
        stages = {name: [s for s in division.homes[name] if s in here] for name in held}
        self._window = GradientWindow(held, stages, tied, self._replicas)
        of_stage: dict[int, list[nn.Parameter]] = {
            stage: [held[name] for name in held if stage in stages[name]] for stage in here
        }
        self._runtime = PipelineRuntime(
            self.module,
            self.groups,
            self.device,
            schedule,
            self.num_stages,
            of_stage,
            self.options.activation_checkpointing,
            self.recorder,
        )
        self._partition_optimizers(division)

    def _staged(self, step: LightningStep, microbatch: MicroBatch, train: bool) -> StagedStep:
        """The stages of a step; another step than the first follows the parameters."""
        key = self._key(step)
        if key not in self._steps:
            assert self.division is not None
            assert self._runtime is not None
            world = dist.group.WORLD
            assert world is not None
            traced = record(step.alone(microbatch), self.module, self.device, world, self._fetch)
            program = build_program(traced, Modules(traced, self.module), is_within(self._units()))
            require_same(program, world, self.device)
            splitting: Splitting = follow(program, self.division.homes, self.num_stages)
            staged = self._runtime.stage(program, splitting)
            self._runtime.remember(staged, microbatch, train)
            self._steps[key] = staged
        return self._steps[key]

    def _units(self) -> set[str]:
        """Modules that stay whole in other steps: the units, and modules that the first step did not call."""
        assert self.division is not None
        units = set(self.division.program.units)
        called = {parts for unit in units for parts in _with_parents(unit)}
        return units | {name for name, _ in self.module.named_modules() if name and name not in called}

    def _fetch(self, name: str) -> Tensor:
        """A parameter's values, from the rank that holds it. Collective over the pipeline."""
        assert self.division is not None
        owner = self.division.ownership.owner(name)
        parameter = self.module.get_parameter(name)
        value = parameter.detach() if not parameter.is_meta else torch.empty_like(parameter, device=self.device)
        value = value.contiguous()
        dist.broadcast(value, group=self.groups.pipeline, group_src=owner)
        return value

    @staticmethod
    def _key(step: LightningStep) -> Any:
        return step.hook, step.arguments[1:]  # one for each dataloader

    def _check(self, staged: StagedStep, step: LightningStep, first: MicroBatch) -> None:
        """The pipeline's loss and gradients on one micro-batch against the reference's. Raises on every rank."""
        division, runtime = self.division, self._runtime
        assert division is not None
        assert division.reference is not None
        assert runtime is not None
        assert self._window is not None
        alone = MicroBatch(first.value, first.size, 1.0)
        trial = self._step(step.hook, step.arguments)
        with untouched(self.module, self.device):
            outputs = runtime.run(staged, trial, [alone], True, seeding(CHECK_SEED))
            self._window.tied.sum()
            norms = gradient_norms(self._window.parameters.items())
        self.capture.clear()
        mine = {name: norm for name, norm in norms.items() if division.ownership.owner(name) == self.groups.place}
        report = {"loss": float(loss_value(outputs[0])) if outputs else None, "norms": mine}
        reports = gather_json(report, self.groups.pipeline, self.device)
        actual = {name: norm for part in reports for name, norm in part["norms"].items()}
        loss = next(part["loss"] for part in reports if part["loss"] is not None)
        self.findings = compare(
            division.program.items,
            division.stage_of_item,
            division.reference.loss,
            loss,
            division.reference.norms,
            actual,
        )
        exact = all(value.dtype.itemsize >= 4 for value in division.program.values if value.dtype.is_floating_point)
        require_equal(self.findings, EXACT if exact else MIXED)

    # ---- optimizers and precision ----

    def take_optimizers(self, optimizers: Sequence[Any], plugin: Any) -> None:
        """The optimizers that the user built, and the precision plugin; before the first batch."""
        self._optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        self._plugin = plugin
        plugin.clip_grad_by_norm = self._clip_by_norm

    def _partition_optimizers(self, division: Division) -> None:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._partitions = [
            OptimizerPartition(optimizer, names, division.ownership, self.groups.place) for optimizer in self._optimizers
        ]
        if self._states is not None:
            for partition, state in zip(self._partitions, self._states, strict=False):
                partition.load_full_state_dict(state)
            self._states = None

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self.division is not None
        inside = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert self._window is not None
        chosen = {name: p for name, p in self._window.parameters.items() if id(p) in inside}
        clip_by_norm(chosen, self.division.ownership, self.groups.pipeline, clip_val, device=self.device)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """The whole module's, on the first rank of the first pipeline. Collective."""
        self.metrics.share()
        if self.division is None:
            return self.module.state_dict()
        if self.groups.replica != 0:
            return {}
        return full_state_dict(self.module, self.division.ownership, self.groups.pipeline, False, self.device)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a whole module's state."""
        if self.division is None and not self._is_whole():
            self._weights = state
        load_full_state_dict(self.module, state, strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole optimizer's, on the first rank of the first pipeline. Collective."""
        plain = getattr(optimizer, "optimizer", optimizer)
        partition = next((p for p in self._partitions if p.optimizer is plain), None)
        if partition is None:
            state: dict[str, Any] = plain.state_dict()
            return state
        if self.groups.replica != 0:
            return {}
        return partition.full_state_dict(self.groups.pipeline, False, self.device)

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load states of whole optimizers; before the module is divided only what is not large."""
        if self._partitions:
            for partition, state in zip(self._partitions, states, strict=True):
                partition.load_full_state_dict(state)
            return
        self._states = states
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict({**state, "state": {}})

    def report(self) -> CommunicationReport | None:
        """What averaging over replicas cost. Collective over the replicas."""
        return None if self._replicas is None else self._replicas.report()

    def close(self, gather: bool) -> None:
        """Give back a whole module (unless it never was), and free what this object holds. Collective if ``gather``."""
        if self.division is not None and gather and not self.options.meta_init:
            self.metrics.share()
            gather_full(self.module, self.division.ownership, self.groups.pipeline, self.device)
            self.division = None
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
        self.metrics.close()
        if self._plugin is not None:
            vars(self._plugin).pop("clip_grad_by_norm", None)
        self._runtime = None
        self._steps.clear()


def loss_value(output: Any) -> Any:
    """The loss in a step's detached output."""
    return output["loss"] if isinstance(output, dict) else output


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
