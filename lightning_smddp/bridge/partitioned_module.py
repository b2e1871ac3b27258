"""A LightningModule that a pipeline trains: whole before its first batch, then spread over the ranks of the pipeline.

    Unpartitioned --first training batch--> PartitionedModule

At the end of the run each rank has the whole module again, and its own part of the optimizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp.bridge.metrics import patched
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.bridge.step_record import StepRecorder
from lightning_smddp.communication.nonfinite import bad_gradients
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules
from lightning_smddp.pipeline.mesh import Groups
from lightning_smddp.pipeline.partition.assignment import follow, nodes_by_stage
from lightning_smddp.pipeline.partition.costs import Resources
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import PartitionPlan, build_on_all, own_error, record, require_same
from lightning_smddp.pipeline.partition.self_check import Finding
from lightning_smddp.pipeline.partition.split import is_within
from lightning_smddp.pipeline.runtime.engine import PipelineRuntime
from lightning_smddp.pipeline.runtime.stage_program import StagedStep, StagePlan, TracedPath
from lightning_smddp.pipeline.runtime.trace_cache import TraceCache
from lightning_smddp.pipeline.state.gradients import GradientStash, clip_by_norm, share_overflow
from lightning_smddp.pipeline.state.optimizer import OptimizerPartition
from lightning_smddp.pipeline.state.replicas import ReplicaGradients
from lightning_smddp.pipeline.state.state_dict import (
    SharedBuffers,
    full_state_dict,
    load_full_state_dict,
    partial_state_dict,
)
from lightning_smddp.pipeline.view.view import GlobalView
from lightning_smddp.seeding import mix, step_seed
from lightning_smddp.sharding.optimizer_shards import OptimizerShards
from lightning_smddp.sharding.optimizer_states import whole_states
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers
from lightning_smddp.wire.stream import gathered_objects

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_smddp.strategies.pipeline_options import PipelineOptions


@dataclass(frozen=True)
class RunSetup:
    """The user's module, the strategy's options, and where this rank stands.

    Attributes:
        module: the user's LightningModule.
        options: the strategy's.
        groups: this rank's position in the mesh, and its process groups.
        device: of this rank.
        step_context: makes, for the name of a step, the context that Lightning enters around it (precision).
        timeout: of collectives.
    """

    module: LightningModule
    options: PipelineOptions
    groups: Groups
    device: torch.device
    step_context: Callable[[str], AbstractContextManager[Any]]
    timeout: timedelta

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline, on all of its ranks."""
        return self.groups.pipeline.size() * self.options.stages_per_rank

    @property
    def rank_of_stage(self) -> Sequence[int]:
        """For each stage the pipeline rank that runs it."""
        return self.options.schedule.rank_of_stage(self.num_stages, self.groups.pipeline.size())

    @property
    def last_rank(self) -> int:
        """The pipeline rank of the last stage, where a step ends: it alone has the step's loss and logs."""
        return self.rank_of_stage[-1]

    @property
    def ends_here(self) -> bool:
        """Whether this rank has the last stage, and so the step's loss and logs."""
        return self.groups.pipeline_rank == self.last_rank

    @property
    def num_replicas(self) -> int:
        """Pipelines that train side by side, each on batches of its own."""
        return self.groups.mesh.num_replicas

    @property
    def world(self) -> dist.ProcessGroup:
        """All ranks of all pipelines."""
        world = dist.group.WORLD
        assert world is not None
        return world

    def is_whole(self) -> bool:
        """Whether all parameters of the module have memory on this rank's device."""
        return all(parameter.device.type == self.device.type for parameter in self.module.parameters())


def warn_on_first_rank(message: str) -> None:
    """Warn on the first rank of the world alone: the others have the same to say."""
    if dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)


class ModuleState:
    """What a checkpoint, the optimizers and the watch for NaN ask of a module; here, where each rank has all of it."""

    setup: RunSetup
    remembered: Mapping[str, Mapping[str, Tensor]] = {}  # loaded, what compression remembers of all parameters

    def state_dict(self, gather: bool) -> dict[str, Any]:
        """The whole module's on the first rank; without ``gather`` of each rank what it holds. Collective."""
        return self.setup.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a whole module's state: each rank takes what it holds. Names that differ are an error if ``strict``."""
        load_full_state_dict(self.setup.module, state, strict)

    def optimizer_state(self, optimizer: Optimizer, gather: bool) -> dict[str, Any]:
        """The whole optimizer's on the first rank; without ``gather`` of each rank what it holds. Collective."""
        return optimizer.state_dict()

    def compression_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What compression of gradients remembers, by parameter, on the first rank; empty if nothing. Collective."""
        return self.remembered

    def optimized(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameters of all ranks that ``optimizer`` steps."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def nonfinite(self) -> dict[str, str] | None:
        """What is not finite in this rank's gradients, by parameter, before averaging; None if there is none."""
        return None

    def report(self) -> CommunicationReport | None:
        """What averaging over replicas cost; None if that is not known. Collective over the replicas."""
        return None


class Unpartitioned(ModuleState):
    """A module before the batch that shows how to partition it.

    What a checkpoint holds may have nowhere to go yet: with ``meta_init`` parameters have no memory, and a rank with
    the optimizers' whole states would need memory for all of them. It waits here.

    Attributes:
        optimizers: that the user built; empty if there is no training.
        shards: of these, not cut yet; empty without ``shard="optimizer"``.
        weights: loaded values of parameters without memory, by name.
        optimizer_states: loaded, one for each optimizer.
    """

    def __init__(self, setup: RunSetup) -> None:
        self.setup = setup
        self.optimizers: list[Optimizer] = []
        self.shards: list[OptimizerShards] = []
        self.weights: dict[str, Tensor] = {}
        self.optimizer_states: Sequence[Mapping[str, Any]] | None = None

    @override
    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        # Parameters without memory take no values: those wait until it is known which rank holds them.
        parameters = self.setup.module.named_parameters()
        self.weights = {name: state[name] for name, parameter in parameters if parameter.is_meta and name in state}
        super().load_state_dict(state, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer, gather: bool) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state_dict()
        if self.optimizer_states is not None:
            state["state"] = self.optimizer_states[self.optimizers.index(optimizer)]["state"]
        return state

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what is small, options of parameter groups; keep the rest until it is known who needs it."""
        self.optimizer_states = states
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict({**state, "state": {}})


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
        is_gathered: the run is over, and each rank has the whole module again.
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
    is_gathered: bool = False
    _traces: dict[Any, TraceCache] = field(default_factory=dict)  # by key of the step

    @property
    def replicas(self) -> ReplicaGradients | None:
        """Averages gradients over replicas; None if there is one alone, or no training."""
        return self.stash.replicas

    # ---- the paths that steps take ----

    def remember_first(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> None:
        """The plan's graph is the path of ``step``, traced on the last of ``microbatches``. Collective."""
        staged = self._stage(step, self.plan.graph, self.plan.stages)
        self._remember(staged, step, microbatches, len(microbatches) - 1)

    def paths(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> list[TracedPath]:
        """The path that ``step`` takes on each micro-batch; it is traced where it is new. Collective then."""
        if step.trains:
            self.buffers.before_training()
        else:
            self.buffers.share()
        if step.seed is None:
            step.seed = seed_of_batch(self.setup, step, self.run_seed)
        if step.key not in self._traces:
            self._remember(self._trace(step, microbatches[0]), step, microbatches, 0)
        return self._traces[step.key].find(step, microbatches)

    def _remember(
        self, staged: StagedStep, step: LightningStep, microbatches: Sequence[MicroBatch], index: int
    ) -> None:
        """``staged`` is the first path of ``step``, traced on one of the micro-batches. Collective."""
        retrace: Callable[[LightningStep, MicroBatch, int], StagedStep] = self._trace
        scopes = self.recorder.scopes
        traces = TraceCache(self.runtime, [staged], retrace, step.trains, lambda: bool(scopes.counts))
        self._traces[step.key] = traces
        traces.remember(staged, step, microbatches[index], index)

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
        for name, _ in self.setup.module.named_modules():
            # Modules that units are in are traced through.
            if name and not any(unit.startswith(f"{name}.") for unit in self.plan.graph.units):
                units.add(name)
        return units

    def _fetch(self, name: str) -> Tensor:
        """A parameter's values, from the rank that holds it. Collective."""
        parameter = self.setup.module.get_parameter(name)
        value = torch.empty_like(parameter, device=self.setup.device, memory_format=torch.contiguous_format)
        if not parameter.is_meta:  # a copy, so that the trace is the same where the parameter is and elsewhere
            value.copy_(parameter.detach())
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
        was_entered = self.view.is_entered
        with self.view.left(), ExitStack() as stack:
            for partition in self.optimizers if was_entered else ():
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
        inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        chosen = {name: parameter for name, parameter in self.stash.parameters.items() if id(parameter) in inside}
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
        if self.is_gathered:
            return super().state_dict(gather)
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

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of whole optimizers, one for each: each rank takes its part."""
        for partition, state in zip(self.optimizers, states, strict=True):
            shards = None if self.sharded is None else self.sharded.of(partition.optimizer)
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
        return super().optimized(optimizer) if partition is None else partition.all_parameters

    def _partition_of(self, optimizer: Optimizer) -> OptimizerPartition | None:
        return next((partition for partition in self.optimizers if partition.optimizer is optimizer), None)

    @override
    def report(self) -> CommunicationReport | None:
        return None if self.replicas is None else self.replicas.report()

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
