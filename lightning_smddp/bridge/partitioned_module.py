"""A LightningModule whose parameters are spread over the ranks of a pipeline: its steps, hooks and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp.bridge.metrics import patched
from lightning_smddp.bridge.module_states import BY_MEMORY, ModuleState, RunSetup, leave_in_parts, warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.bridge.step_record import StepRecorder
from lightning_smddp.communication.nonfinite import bad_gradients
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules
from lightning_smddp.pipeline.partition.assignment import follow, nodes_by_stage
from lightning_smddp.pipeline.partition.costs import Resources, fits_on_hosts
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import PartitionPlan, build_on_all, own_error, record, require_same
from lightning_smddp.pipeline.partition.self_check import EXACT, MIXED, Finding
from lightning_smddp.pipeline.partition.split import is_within
from lightning_smddp.pipeline.runtime.engine import PipelineRuntime
from lightning_smddp.pipeline.runtime.stage_program import StagedStep, StagePlan, TracedPath
from lightning_smddp.pipeline.runtime.trace_cache import TraceCache
from lightning_smddp.pipeline.state.gradients import GradientStash, clip_by_norm, share_overflow
from lightning_smddp.pipeline.state.optimizer import OptimizerPartition
from lightning_smddp.pipeline.state.replicas import ReplicaGradients
from lightning_smddp.pipeline.state.state_dict import SharedBuffers, full_state_dict, partial_state_dict, unshard
from lightning_smddp.pipeline.view.view import GlobalView
from lightning_smddp.seeding import mix, step_seed
from lightning_smddp.sharding.optimizer_states import whole_states
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers
from lightning_smddp.wire.stream import CPU, gathered_objects


@dataclass
class PartitionedModule(ModuleState):
    """This rank's part of a module, made by :class:`~lightning_smddp.bridge.partitioning.Partitioning`.

    What is said to be collective is so over the pipeline.

    Attributes:
        setup: of the run.
        recorder: keeps what steps do.
        plan: which stage has what.
        resources: that it was planned for.
        stash: gradients between the schedule, which makes them, and Lightning's backward.
        runtime: runs this rank's stages.
        view: the whole module, for hooks.
        buffers: sends buffers that a stage has changed to the other ranks.
        run_seed: random numbers follow from it, the same on all ranks.
        optimizers: with the parameters of this rank.
        sharded: with ``shard="optimizer"`` the same optimizers, whose work replicas share.
        findings: of the check before training.
        notes: rows for the table of what the user should know.
    """

    setup: RunSetup
    recorder: StepRecorder
    plan: PartitionPlan
    resources: Resources
    stash: GradientStash
    runtime: PipelineRuntime
    view: GlobalView
    buffers: SharedBuffers
    run_seed: int
    optimizers: list[OptimizerPartition] = field(default_factory=list)
    sharded: ShardedOptimizers | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    _traces: dict[Any, TraceCache] = field(default_factory=dict)  # by key of the step

    @property
    def replicas(self) -> ReplicaGradients | None:
        """Averages gradients over replicas; None if there is one alone, or no training."""
        return self.stash.replicas

    @property
    def tolerance(self) -> float:
        """How far the pipeline's numbers may be from one process's, relatively: rounding explains so much."""
        if self.plan.is_exact:
            return EXACT
        return MIXED

    # ---- the paths that steps take ----

    def remember_first(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> None:
        """The plan's graph is the path of ``step``, traced on the last of ``microbatches``. Collective."""
        staged = self._stage(step, self.plan.graph, self.plan.stages)
        last = len(microbatches) - 1
        self._add(step, staged).remember(staged, step, microbatches[last], last)

    def paths(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> list[TracedPath]:
        """The path that ``step`` takes on each micro-batch; it is traced where it is new. Collective then."""
        if step.trains:
            self.buffers.before_training()
        else:
            self.buffers.share()
        if step.seed is None:
            step.seed = seed_of_batch(self.setup, step, self.run_seed)
        return self.paths_of(step, microbatches)

    def paths_of(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> list[TracedPath]:
        """The same while the ranks have the same buffers."""
        traces = self._traces.get(step.key)
        if traces is None:
            staged = self._trace(step, microbatches[0])
            traces = self._add(step, staged)
            traces.remember(staged, step, microbatches[0])
        return traces.find(step, microbatches)

    def _add(self, step: LightningStep, staged: StagedStep) -> TraceCache:
        retrace: Callable[[LightningStep, MicroBatch, int], StagedStep] = self._trace
        traces = TraceCache(self.runtime, [staged], retrace, step.trains, lambda: bool(self.recorder.scopes.counts))
        self._traces[step.key] = traces
        return traces

    def _trace(self, step: LightningStep, microbatch: MicroBatch, index: int = 0) -> StagedStep:
        """Another step, or another path of one, cut where the parameters already are. Collective.

        Raises:
            SplitError: on every rank of the pipeline: it does not fit the stages.
        """
        setup, group = self.setup, self.setup.groups.pipeline
        self.buffers.share()
        try:
            generators = self.runtime.wrappers.generators
            with generators.preserved(), torch.set_grad_enabled(step.trains):
                generators.seed(step.seed_of(index))  # as the run does: that is no draw of the step's
                run = step.alone(microbatch, generators, index)
                traced = record(run, setup.module, setup.device, group, self._fetch)
        except SplitError as error:
            if step.trains:
                raise own_error(error) from None
            raise  # of the same kind on all ranks, which then go on alike
        modules = Modules(traced, setup.module)
        graph = build_on_all(traced, modules, is_within(self._units()), group)
        require_same(graph, group)
        cuts = follow(graph, self.plan.parameter_stages, self.runtime.num_stages)
        self.recorder.scopes.learn(units_here(graph, cuts, setup))
        return self._stage(step, graph, cuts)

    def _stage(self, step: LightningStep, graph: StepGraph, stages: tuple[StagePlan, ...]) -> StagedStep:
        if step.trains:
            self.buffers.note_training(graph)
        return self.runtime.stage(graph, stages)

    def _units(self) -> set[str]:
        """Modules that stay whole in other steps: the units, and modules that the first step did not call."""
        units = set(self.plan.graph.units)
        opened = set()  # modules that units are in: these are traced through
        for unit in units:
            opened.update(_parents(unit))
        for name, _ in self.setup.module.named_modules():
            if name and name not in opened:
                units.add(name)
        return units

    def _fetch(self, name: str) -> Tensor:
        """A parameter's values, from the rank that holds it. Collective."""
        parameter = self.setup.module.get_parameter(name)
        if parameter.is_meta:
            value = torch.empty_like(parameter, device=self.setup.device)
        else:  # a copy, so that the trace is the same where the parameter is and elsewhere
            value = parameter.detach().clone()
        value = value.contiguous()
        owner = self.plan.ownership.owner(name)
        dist.broadcast(value, group=self.setup.groups.pipeline, group_src=owner)
        return value

    # ---- hooks ----

    @contextmanager
    def inside_view(self, waits: bool = True) -> Iterator[Callable[..., Any]]:
        """Around a hook: parameters, their gradients, buffers and parameter groups are those of all ranks.

        Gives what to call with the hook's result and arguments: it returns the result, and leaves no tensor of another
        rank in it, nor in a checkpoint among the arguments. For ``waits`` see :meth:`GlobalView.entered`.
        """
        view, module = self.view, self.setup.module
        with ExitStack() as stack:
            if not view.is_entered:
                for partition in self.optimizers:
                    stack.enter_context(partition.unsharded())
            stack.enter_context(patched([(module, "log", view.plain_log(module.log))]))
            stack.enter_context(view.entered(waits))
            stack.enter_context(self.recorder.scopes.absent_shown())
            yield view.plain_result

    @contextmanager
    def outside_view(self) -> Iterator[None]:
        """Around our own collective code: it is about this rank's part, also where a hook calls it."""
        with ExitStack() as stack:
            partitions = self.optimizers if self.view.is_entered else []
            stack.enter_context(self.view.left())
            for partition in partitions:
                stack.enter_context(partition.resharded())
            yield

    # ---- gradients ----

    def deliver(self, factor: float, shares_overflow: bool) -> None:
        """Set ``.grad`` to what the last training step made, times ``factor``. Collective.

        With ``shares_overflow`` a gradient scaler of each rank sees inf and NaN of all of them.
        """
        self.stash.restore(factor)
        for partition in self.optimizers:
            partition.refresh()
            if shares_overflow:
                placeholder = partition.add_placeholder(self.setup.device)
                share_overflow(partition.parameters, placeholder, self.setup.groups.pipeline)

    def clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale the gradients of all ranks' parameters in ``optimizer`` to this norm at the most. Collective."""
        setup = self.setup
        inside: set[int] = set()
        for group in optimizer.param_groups:
            inside.update(map(id, group["params"]))
        chosen = {}
        for name, parameter in self.stash.parameters.items():
            if id(parameter) in inside:
                chosen[name] = parameter
        with self.outside_view():
            clip_by_norm(chosen, self.plan.ownership, setup.groups.pipeline, clip_val, device=setup.device)

    @override
    def nonfinite(self) -> dict[str, str] | None:
        """What is not finite in this rank's gradients, by parameter; None if no replica has anything.

        Before averaging.
        """
        if self.replicas is None:
            return bad_gradients(self.stash.parameters.items())
        return self.replicas.take_nonfinite()

    # ---- state: of replicas the first one gives it ----

    @override
    def state_dict(self, gather: bool) -> dict[str, Any]:
        setup = self.setup
        ownership = self.plan.ownership
        if setup.groups.replica != 0:
            return {}
        if not gather:
            return partial_state_dict(setup.module, ownership, setup.groups.pipeline_rank)
        return full_state_dict(setup.module, ownership, setup.groups.pipeline, False, setup.device)

    @override
    def optimizer_state(self, optimizer: Optimizer, gather: bool) -> dict[str, Any]:
        partition = self._partition_of(optimizer)
        if partition is None:
            return super().optimizer_state(optimizer, gather)
        groups, device = self.setup.groups, self.setup.device
        # Replicas put their shares of the states together, all of them, before only the first goes on.
        states = None
        allowed: AbstractContextManager[None] = nullcontext()
        if self.sharded is not None:
            shards = self.sharded.of(partition.optimizer)
            states = whole_states(shards, groups.data_parallel_group, device)
            allowed = shards.state_allowed()
        if groups.replica != 0:
            return {}
        with allowed:
            if not gather:
                return partition.partial_state_dict(states)
            return partition.full_state_dict(groups.pipeline, False, device, states)

    @override
    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        for partition, state in zip(self.optimizers, states, strict=True):
            shards = None
            if self.sharded is not None:
                shards = self.sharded.of(partition.optimizer)
            partition.load_full_state_dict(state, shards)

    @override
    def compression_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        if self.replicas is None or self.setup.options.gradients.compression is None:
            return {}
        local = self.replicas.state_dict()
        if self.setup.groups.replica != 0:
            return {}
        # Parameters of several stages are with each of them, and are averaged together: any rank's values will do.
        whole: dict[str, dict[str, Tensor]] = {}
        for of_rank in gathered_objects(local, self.setup.groups.pipeline, False, self.setup.device):
            for kind, values in of_rank.items():
                whole.setdefault(kind, {}).update(values)
        return whole

    @override
    def optimized(self, optimizer: Optimizer) -> list[nn.Parameter]:
        partition = self._partition_of(optimizer)
        if partition is None:
            return super().optimized(optimizer)
        return partition.all_parameters

    def _partition_of(self, optimizer: Optimizer) -> OptimizerPartition | None:
        for partition in self.optimizers:
            if partition.optimizer is optimizer:
                return partition
        return None

    @override
    def report(self) -> CommunicationReport | None:
        if self.replicas is None:
            return None
        return self.replicas.report()

    def gather_on_hosts(self) -> bool:
        """Give every rank the whole module on its host, where it goes after a run in any case. Collective.

        Returns:
            False if a host lacks memory for that: then the parts stay on their ranks, with a warning.
        """
        setup = self.setup
        if fits_on_hosts(setup.module, setup.world):
            self.view.close()
            unshard(setup.module, self.plan.ownership, setup.groups.pipeline, setup.device, to=CPU)
            return True
        leave_in_parts(setup.module, BY_MEMORY)
        warn_on_first_rank(f"{type(setup.module).__name__} stays in parts, each on its rank: {BY_MEMORY}.")
        return False

    def close(self) -> None:
        """Free the memory and connections that the replicas of this stage share. Not collective."""
        if self.sharded is not None:
            self.sharded.close()
        if self.replicas is not None:
            self.replicas.close()
            self.stash.replicas = None


def seed_of_batch(setup: RunSetup, step: LightningStep, run_seed: int) -> int:
    """The seed of the random numbers that ``step`` draws on its batch."""
    indices = [index for index in step.arguments if isinstance(index, int)]
    seed = step_seed(run_seed, step.hook, step.module.current_epoch, *indices)
    return mix(seed, setup.groups.replica) if setup.groups.replica else seed


def units_here(graph: StepGraph, stages: Sequence[StagePlan], setup: RunSetup) -> dict[str, bool]:
    """Modules that are placed whole, and whether this rank has them."""
    found: dict[str, bool] = {}
    for stage, node in nodes_by_stage(graph, stages):
        if node.module is not None:
            is_here = setup.rank_of_stage[stage] == setup.groups.pipeline_rank
            found[node.module] = found.get(node.module, False) or is_here
    return found


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
