"""A LightningModule that a pipeline trains: whole before its first batch, then spread over the ranks of the pipeline.

    Unpartitioned --first training batch--> PartitionedModule

Both say what a checkpoint and the optimizers ask of a module. At the end of the run each rank has
the whole module again, and its own part of the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.bridge.step_record import StepRecorder
from lightning_smddp.communication.nonfinite import NonFinite, bad_gradients
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.activations import Checkpointing, checkpointing_on
from lightning_smddp.pipeline.capture.boundaries import StagePlan
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules
from lightning_smddp.pipeline.mesh import Groups
from lightning_smddp.pipeline.partition.assignment import follow, nodes_by_stage
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, MicroBatches
from lightning_smddp.pipeline.partition.plan import PartitionPlan, own_error, record, same_graph
from lightning_smddp.pipeline.runtime.engine import PipelineRuntime
from lightning_smddp.pipeline.runtime.stage_program import StagedStep, TracedPath
from lightning_smddp.pipeline.runtime.trace_cache import TraceCache
from lightning_smddp.pipeline.state.gradients import GradientStash
from lightning_smddp.pipeline.state.optimizer import OptimizerPartition
from lightning_smddp.pipeline.state.state_dict import (
    full_state_dict,
    load_full_state_dict,
    partial_state_dict,
)
from lightning_smddp.pipeline.view.view import GlobalView
from lightning_smddp.seeding import mix, step_seed
from lightning_smddp.sharding.optimizer_shards import OptimizerShards
from lightning_smddp.sharding.optimizer_states import whole_states
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_smddp.strategies.options import PipelineOptions
    from lightning_smddp.strategies.sanity_checks import SanityChecks

State: TypeAlias = Mapping[str, Any]
"""A state dict, of a module or an optimizer."""
StateDict: TypeAlias = dict[str, Any]
"""The same, made here."""


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
        checks: know whether gradients are watched for NaN and inf.
    """

    module: LightningModule
    options: PipelineOptions
    groups: Groups
    device: torch.device
    step_context: Callable[[str], AbstractContextManager[Any]]
    timeout: timedelta
    checks: SanityChecks

    @property
    def checkpointing(self) -> Checkpointing:
        """What units keep for backward."""
        return checkpointing_on(self.device, self.options.activation_checkpointing)

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline, on all of its ranks."""
        return self.groups.pipeline.size() * self.options.stages_per_rank

    @property
    def rank_of_stage(self) -> Sequence[int]:
        """For each stage the pipeline rank that runs it."""
        return self.options.schedule.rank_of_stage(self.num_stages, self.groups.pipeline.size())

    @property
    def stages_here(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self.rank_of_stage) if rank == self.groups.pipeline_rank]

    @property
    def last_rank(self) -> int:
        """The pipeline rank of the last stage, where a step ends: it alone has the step's loss and logs."""
        return self.rank_of_stage[-1]

    @property
    def num_replicas(self) -> int:
        """Pipelines that train side by side, each on batches of its own."""
        return self.groups.mesh.num_replicas

    def is_whole(self) -> bool:
        """Whether all parameters of the module have memory on this rank's device."""
        return all(parameter.device.type == self.device.type for parameter in self.module.parameters())


class Unpartitioned:
    """A module before the batch that shows how to partition it: each rank has all of it.

    What a checkpoint holds may have nowhere to go yet: with ``meta_init`` parameters have no memory, and a rank with
    the optimizers' whole states would need memory for all of them. It waits here.

    Attributes:
        setup: of the run.
        optimizer: that the user built; None if there is no training.
        shards: of it, not cut yet; None without ``shard="optimizer"``.
        weights: a loaded state, where parameters have no memory yet.
        loaded: of the optimizer.
    """

    def __init__(self, setup: RunSetup) -> None:
        self.setup = setup
        self.optimizer: Optimizer | None = None
        self.shards: OptimizerShards | None = None
        self.weights: State = {}
        self.loaded: State | None = None

    def state_dict(self, gather: bool) -> StateDict:
        """The whole module's on every rank, gathered or not. Parameters that wait for memory are on ``meta``."""
        return self.setup.module.state_dict()

    def load_state_dict(self, state: State, strict: bool) -> None:
        """Load a whole module's state. Names that differ are an error if ``strict``."""
        # Parameters without memory take no values: those wait until it is known which rank holds them.
        module = self.setup.module
        self.weights = state if any(p.is_meta for p in module.parameters()) else {}
        load_full_state_dict(module, state, strict)

    def optimizer_state(self, gather: bool) -> StateDict:
        """The optimizer's, with what was loaded for it."""
        assert self.optimizer is not None
        state: StateDict = self.optimizer.state_dict()
        if self.loaded is not None:
            state["state"] = dict(self.loaded["state"])
        return state

    def load_optimizer_state(self, state: State) -> None:
        """Load what is small, options of parameter groups; keep the rest until it is known who needs it."""
        assert self.optimizer is not None
        self.loaded = state
        self.optimizer.load_state_dict({**state, "state": {}})

    def report(self) -> None:
        """Nothing was averaged yet."""


@dataclass
class PartitionedModule:
    """This rank's part of a module, made by :func:`~lightning_smddp.bridge.partitioning.partition`.

    What is said to be collective is so over the pipeline.

    Attributes:
        setup: of the run.
        recorder: keeps what steps do.
        plan: which stage has what.
        stash: gradients between the schedule, which makes them, and Lightning's backward.
        runtime: runs this rank's stages.
        view: the whole module, for hooks.
        run_seed: random numbers follow from it, the same on all ranks.
        optimizer: with the parameters of this rank; None if there is no training.
        sharded: with ``shard="optimizer"`` the same, whose work replicas share.
        notes: for the table: what the user should know.
        is_gathered: the run is over, and each rank has the whole module again.
        traces: by key of a step, what is known of the paths that it takes.
    """

    setup: RunSetup
    recorder: StepRecorder
    plan: PartitionPlan
    stash: GradientStash
    runtime: PipelineRuntime
    view: GlobalView
    run_seed: int
    optimizer: OptimizerPartition | None = None
    sharded: ShardedOptimizers | None = None
    notes: list[str] = field(default_factory=list)
    is_gathered: bool = False
    traces: dict[Any, TraceCache] = field(default_factory=dict)

    # ---- the paths that steps take ----

    def paths(self, step: LightningStep, microbatches: MicroBatches) -> list[TracedPath]:
        """The path that ``step`` takes on each micro-batch; it is traced where it is new. Collective then."""
        self.view.share_buffers(step.trains)
        if step.key not in self.traces:
            self.remember(self._trace(step, microbatches[0], 0), step, microbatches[0], 0)
        return self.traces[step.key].find(step, microbatches)

    def trial(self, step: LightningStep, microbatches: MicroBatches) -> list[Any]:
        """Run micro-batches for nothing; what the step returns for each, on the rank where it ends. Collective."""
        try:
            paths = self.paths(step, microbatches)
            run = self.runtime.run(paths, step, microbatches, step.trains)
            self.runtime.exchange.run(None, failures=run.failures)
            return run.outputs
        finally:
            step.forget()

    def remember(self, staged: StagedStep, step: LightningStep, microbatch: MicroBatch, index: int) -> None:
        """``staged`` is the first path of ``step``, traced on micro-batch ``index``. Collective."""
        scopes = self.recorder.scopes
        traces = TraceCache(self.runtime, [staged], self._trace, step.trains, lambda: bool(scopes.counts))
        self.traces[step.key] = traces
        traces.remember(staged, step, microbatch, index)

    def _trace(self, step: LightningStep, microbatch: MicroBatch, index: int) -> StagedStep:
        """Another step, or another path of one, cut where the parameters already are. Collective.

        Raises:
            SplitError: on every rank of the pipeline: it does not fit the stages.
        """
        setup, group = self.setup, self.setup.groups.pipeline
        self.view.share_buffers(trains=False)
        try:
            with step.alone(microbatch, self.runtime.wrappers.generators, index) as run:
                traced = record(run, setup.module, setup.device, group, self._fetch)
        except SplitError as error:
            if step.trains:
                raise own_error(error) from None
            raise  # of the same kind on all ranks, which then go on alike
        graph = same_graph(traced, Modules(traced, setup.module), self._units(), group)
        cuts = follow(graph, self.plan.parameter_stages, self.plan.ownership, self.runtime.rank_of_stage)
        self.recorder.scopes.learn(units_here(graph, cuts, setup))
        return self.runtime.stage(graph, cuts)

    def _units(self) -> set[str]:
        """Modules that stay whole in other steps: the units, and what the first step did not call."""
        # Modules that units are in are traced through.
        units = self.plan.graph.units
        names = [name for name, _ in self.setup.module.named_modules() if name]
        return {name for name in names if not any(unit.startswith(f"{name}.") for unit in units)}

    def _fetch(self, name: str) -> Tensor:
        """A parameter's values, from the rank that holds it. Collective."""
        parameter = self.setup.module.get_parameter(name)
        value = torch.empty_like(parameter, device=self.setup.device, memory_format=torch.contiguous_format)
        if not parameter.is_meta:  # a copy, so that the trace is the same where the parameter is and elsewhere
            value.copy_(parameter.detach())
        dist.broadcast(value, group=self.setup.groups.pipeline, group_src=self.plan.ownership.owner(name))
        return value

    # ---- hooks ----

    @contextmanager
    def inside_view(self, waits: bool = True) -> Iterator[Callable[..., Any]]:
        """Around a hook: parameters, their gradients and buffers are those of all ranks.

        Gives what to call with the hook's result and arguments: it returns the result, and leaves no tensor of another
        rank in it, nor in a checkpoint among the arguments. For ``waits`` see :meth:`GlobalView.entered`.
        """
        view, module = self.view, self.setup.module
        original = module.log

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            original(name, view.plain(value), *args, **kwargs)

        with patched([(vars(module), "log", log)]), view.entered(waits), self.recorder.scopes.absent_shown():
            yield view.plain_result

    def outside_view(self) -> AbstractContextManager[None]:
        """Around our own collective code: it is about this rank's part, also where a hook calls it."""
        return self.view.left()

    # ---- gradients ----

    def nonfinite(self, changed: bool) -> NonFinite | None:
        """What is not finite in the gradients of this rank's stages, the same on all replicas.

        ``changed``: whether code of the user's may have written them since the backward pass.
        """
        if self.stash.replicas is not None:
            return self.stash.replicas.nonfinite(changed)
        own = bad_gradients(self.stash.parameters.items())
        return None if own is None else NonFinite({}, own)

    def report(self) -> CommunicationReport | None:
        """What averaging over replicas cost; None with one. Collective over the replicas."""
        return self.stash.replicas.synchronizer.report() if self.stash.replicas is not None else None

    # ---- state: of replicas the first one gives it ----

    def state_dict(self, gather: bool) -> StateDict:
        """The whole module's on the first rank; without ``gather`` of each rank what it holds. Collective."""
        if self.is_gathered:
            return self.setup.module.state_dict()
        if self.setup.groups.replica != 0:
            return {}
        return full_state_dict(self.view) if gather else partial_state_dict(self.view)

    def load_state_dict(self, state: State, strict: bool) -> None:
        """Load a whole module's state: this rank takes what it holds. Names that differ are an error if ``strict``."""
        load_full_state_dict(self.setup.module, state, strict)

    def optimizer_state(self, gather: bool) -> StateDict:
        """The whole optimizer's on the first rank; without ``gather`` of each rank what it holds. Collective."""
        groups, device = self.setup.groups, self.setup.device
        assert self.optimizer is not None
        # Replicas put their shares of the states together, all of them, before only the first goes on.
        shards = self.optimizer.shards
        states = None if shards is None else whole_states(shards, groups.data_parallel_group, device)
        if groups.replica != 0:
            return {}
        with nullcontext() if shards is None else shards.state_allowed():
            if not gather:
                return self.optimizer.partial_state_dict(states)
            return self.optimizer.full_state_dict(groups.pipeline, device, states)

    def load_optimizer_state(self, state: State) -> None:
        """Load the state of a whole optimizer: this rank takes its part."""
        assert self.optimizer is not None
        self.optimizer.load_full_state_dict(state)

    def close(self) -> None:
        """Free the memory and connections that the replicas of this stage share. Not collective."""
        if self.sharded is not None:
            self.sharded.close()
        if self.stash.replicas is not None:
            self.stash.replicas.close()
            self.stash.replicas = None


def seed_of_batch(setup: RunSetup, step: LightningStep, run_seed: int) -> int:
    """The seed of the random numbers that ``step`` draws on its batch."""
    indices = [index for index in step.arguments if isinstance(index, int)]
    seed = step_seed(run_seed, step.hook, step.module.current_epoch, *indices)
    return mix(seed, setup.groups.replica) if setup.groups.replica else seed


def units_here(graph: StepGraph, stages: Sequence[StagePlan], setup: RunSetup) -> dict[str, bool]:
    """Modules that are placed whole, and whether this rank has them."""
    own = setup.stages_here
    here = {node.module for stage, node in nodes_by_stage(graph, stages) if stage in own}
    return {unit: unit in here for unit in graph.units}
