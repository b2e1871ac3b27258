"""Which modules are units, and where the step is cut: decided once, by one rank, as plain data for all."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from lightning_smddp.pipeline.capture.graph import IsSmall, Modules, Node, SplitError, StepGraph, build_graph
from lightning_smddp.pipeline.capture.records import Trace
from lightning_smddp.pipeline.partition.live_sets import boundary_values, live_sets, nbytes, unit_starts
from lightning_smddp.pipeline.partition.reference import Reference
from lightning_smddp.pipeline.runtime.stage_graph import StagePlan
from lightning_smddp.planner.partition import Partition, best_partition, given_partition
from lightning_smddp.planner.problem import Link, NodeCost, PartitionError, PartitionProblem

_BACKWARD_OF_FORWARD = 2.0  # time of a backward where only the forward was measured
_BALANCED = 1.03  # a slowest stage this close to the mean is not worth opening more modules,
_NEGLIGIBLE = 5  # nor is one that is slower by as many messages' latencies: times vary as much
_ROUNDS = 24  # modules opened at most in search of a better balance
_PATIENCE = 4  # of them without any success,
_GAIN = 0.98  # which is a slowest stage of less than this share of the best one's time
_NAMED = 5  # modules that an error message explains


@dataclass(frozen=True)
class StageCuts:
    """A step cut into stages.

    Attributes:
        units: modules that are placed whole.
        cuts: first nodes of all stages but the first.
        live: the values that cross each cut.
        again: for each stage the earlier nodes that it repeats.
    """

    units: tuple[str, ...]
    cuts: tuple[int, ...]
    live: tuple[tuple[int, ...], ...]
    again: tuple[tuple[int, ...], ...]

    @classmethod
    def at(cls, graph: StepGraph, cuts: Sequence[int]) -> StageCuts:
        """Cut ``graph`` before the nodes ``cuts``."""
        live, again = live_sets(graph, cuts)
        repeated = tuple(tuple(sorted(nodes)) for nodes in again)
        return cls(graph.units, tuple(cuts), tuple(live), repeated)

    def plans(self, num_nodes: int) -> list[StagePlan]:
        """What each stage does in a step of ``num_nodes`` nodes."""
        plans = []
        received: tuple[int, ...] = ()
        for stage, (begin, end) in enumerate(self._bounds(num_nodes)):
            sent: tuple[int, ...] = ()
            if stage < len(self.cuts):
                sent = self.live[stage]
            repeated = frozenset(self.again[stage])
            plans.append(StagePlan(stage, begin, end, repeated, received, sent))
            received = sent
        return plans

    def _bounds(self, num_nodes: int) -> Iterator[tuple[int, int]]:
        """The first node of each stage, and the first one behind it."""
        return pairwise([0, *self.cuts, num_nodes])

    def nodes_by_stage(self, graph: StepGraph) -> Iterator[tuple[int, Node]]:
        """All nodes of ``graph`` in order, each with the stage that it belongs to."""
        for stage, (begin, end) in enumerate(self._bounds(len(graph.nodes))):
            for node in graph.nodes[begin:end]:
                yield stage, node

    def to_json(self) -> Any:
        """What a checkpoint keeps: the rest follows from the graph."""
        return {"units": list(self.units), "cuts": list(self.cuts)}


@dataclass(frozen=True)
class Resources:
    """What there is to place stages on.

    Attributes:
        rank_of_stage: rank in the pipeline of each stage.
        in_flight: micro-batches whose activations each stage keeps at once.
        parameter_bytes: of each parameter, with its gradient and optimizer state.
        memory_limit: bytes of a rank, or None.
        links: between the ranks of each stage and the next.
    """

    rank_of_stage: tuple[int, ...]
    in_flight: tuple[int, ...]
    parameter_bytes: Mapping[str, int]
    memory_limit: float | None = None
    links: tuple[Link, ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together; a rank may have several."""
        return len(self.rank_of_stage)


def problem_of(
    graph: StepGraph,
    resources: Resources,
    reference: Reference | None,
    checkpointing: bool,
) -> PartitionProblem:
    """What the partition has to solve, from measured times (of the trace alone without a ``reference``)."""
    costs = [_cost(node, reference, checkpointing) for node in graph.nodes]
    cut_bytes = [math.inf] * (len(costs) + 1)
    for cut in unit_starts(graph):
        cut_bytes[cut] = nbytes(graph, boundary_values(graph, cut))
    return PartitionProblem(
        nodes=_evened(costs, graph, resources),
        parameter_bytes=resources.parameter_bytes,
        cut_bytes=cut_bytes,
        rank_of_stage=resources.rank_of_stage,
        in_flight=resources.in_flight,
        memory_limit=resources.memory_limit,
        links=resources.links,
    )


def _cost(node: Node, reference: Reference | None, checkpointing: bool) -> NodeCost:
    if reference is not None and reference.forward_seconds:
        forward = reference.forward_seconds[node.index]
        backward = reference.backward_seconds[node.index]
    else:
        forward = node.seconds
        backward = node.seconds * _BACKWARD_OF_FORWARD
    is_unit = node.module is not None
    kept_bytes = node.activation_bytes
    if checkpointing and is_unit:  # its forward runs again in the backward, and nothing is kept in between
        backward += forward
        kept_bytes = 0
    return NodeCost(node.name, forward, backward, kept_bytes, node.parameters, is_unit)


def _evened(costs: list[NodeCost], graph: StepGraph, resources: Resources) -> list[NodeCost]:
    """The same times for layers of one kind: one measurement of each may be cold, or disturbed.

    Layers are of one kind if their names differ in numbers only, and parameters, activations and outputs are as large.
    """
    kinds: dict[Hashable, list[int]] = defaultdict(list)  # indices of the nodes of each kind
    for node, cost in zip(graph.nodes, costs, strict=True):
        name: str | int = node.index  # an operation between units is of no kind
        if node.module is not None:
            name = re.sub(r"\d+", "#", node.name)  # "blocks.3.mlp" is as "blocks.4.mlp"
        sizes = [resources.parameter_bytes.get(parameter, 0) for parameter in node.parameters]
        shapes = [graph.values[value].shape for value in node.outputs]
        kind = (name, tuple(sizes), tuple(shapes), cost.activation_bytes)
        kinds[kind].append(node.index)
    evened = list(costs)
    for alike in kinds.values():
        forward = median(costs[index].forward_s for index in alike)
        backward = median(costs[index].backward_s for index in alike)
        for index in alike:
            evened[index] = replace(costs[index], forward_s=forward, backward_s=backward)
    return evened


def choose_units(
    trace: Trace,
    modules: Modules,
    resources: Resources,
    split: Sequence[str] | None,
    checkpointing: bool,
) -> StepGraph:
    """Open modules, outermost first, until the stages balance; returns the graph with the units that remain.

    Raises:
        SplitError: there is no way to make so many stages; the message says why.
    """
    if split is not None:
        return _units_for(trace, modules, split)
    # A greedy search: each round cuts the step with the units that there are, and opens the one that stands in the way.
    # One module more may be no gain, and two may be, as where both halves of a model are one module each: so it goes on
    # for some rounds without success, and the best graph of all is what counts.
    opened = _first_opened(modules, resources.num_stages)
    best: StepGraph | None = None
    best_seconds = math.inf
    failures = 0
    error: PartitionError | None = None
    for _ in range(_ROUNDS):
        graph = build_graph(trace, modules, _is_closed(opened))
        _refuse_readers(graph)
        found: Partition | None = None
        slowest = math.inf
        try:
            found = best_partition(problem_of(graph, resources, None, checkpointing))
            slowest = max(found.stage_seconds)
        except PartitionError as failure:  # too few units, say
            error = failure
        if slowest < _GAIN * best_seconds:
            best = graph
            best_seconds = slowest
            failures = 0
        else:
            failures += 1
        if best is not None and failures > _PATIENCE:
            break
        if found is not None and _is_balanced(found, resources):
            break
        candidate = _to_open(graph, found, modules)
        if candidate is None:
            break
        opened = opened | {candidate}
    if best is None:
        raise _explained(error, modules, graph)
    return best


def _is_balanced(partition: Partition, resources: Resources) -> bool:
    # A pipeline is as fast as its slowest stage, and no partition makes that faster than the mean.
    mean = sum(partition.stage_seconds) / resources.num_stages
    latency = max((link.latency_s for link in resources.links), default=0.0)
    limit = max(_BALANCED * mean, mean + _NEGLIGIBLE * latency)
    return max(partition.stage_seconds) <= limit


def _is_closed(opened: frozenset[str]) -> IsSmall:
    return lambda name: name not in opened


def _first_opened(modules: Modules, num_stages: int) -> frozenset[str]:
    """Modules that take more than half a stage's share of the time."""
    total = 0.0
    for call in modules.trace.calls:
        if call.parent is None:
            total += modules.seconds(call.module)
    share = total / (2 * num_stages)
    slow = [name for name in modules.calls if modules.seconds(name) > share]
    return frozenset(name for name in slow if _can_open(name, modules))


def _can_open(name: str, modules: Modules) -> bool:
    if name in modules.must_be_whole:
        return False
    return any(inner.startswith(f"{name}.") for inner in modules.calls)


def _to_open(graph: StepGraph, partition: Partition | None, modules: Modules) -> str | None:
    """The unit that stands in the way of a better balance: the longest of the slowest stage, or of all."""
    # Without a partition there are too few units, or a rank has no room: then the longest of all is opened.
    groups = [graph.nodes]
    if partition is not None:
        seconds = partition.stage_seconds
        slowest = seconds.index(max(seconds))
        begin, end = partition.bounds[slowest]
        groups = [graph.nodes[begin:end], graph.nodes]
    for nodes in groups:
        units = []
        for node in nodes:
            if node.module is not None and _can_open(node.module, modules):
                units.append(node)
        if units:
            longest = max(units, key=lambda node: node.seconds)
            return longest.module
    return None


def _units_for(trace: Trace, modules: Modules, split: Sequence[str]) -> StepGraph:
    """Open no more than what has to be opened for stages to begin at the named modules."""

    def is_small(name: str) -> bool:
        return not any(wanted.startswith(f"{name}.") for wanted in split)

    graph = build_graph(trace, modules, is_small)
    _refuse_readers(graph)
    return graph


def partition(
    graph: StepGraph,
    resources: Resources,
    reference: Reference | None,
    split: Sequence[str] | None,
    checkpointing: bool,
) -> Partition:
    """Cut ``graph`` into stages, at the named units or where it is best.

    Raises:
        SplitError: no partition is possible; the message says why.
    """
    problem = problem_of(graph, resources, reference, checkpointing)
    try:
        if split is None:
            return best_partition(problem)
        return given_partition(problem, split)
    except PartitionError as error:
        raise SplitError(f"{error}.{_what_forbids(graph)}") from error


def _refuse_readers(graph: StepGraph) -> None:
    """What comes behind such a place may be another course on each batch, and only one stage would know it."""
    _, reader = graph.last_cut()
    if reader is None or reader.index >= _last_unit(graph):
        return
    if reader.varies:
        raise SplitError(
            f"{reader.name} makes a tensor whose size depends on values that a module made, and the step calls "
            "modules behind it, on stages that count on sizes. Pad it, do it behind the last module, or put it and "
            "what follows into one module."
        )
    raise SplitError(
        f"The step reads the value of a tensor that a module made, at {reader.location} ({reader.name}), and calls "
        "modules behind it: what they do may depend on it, and only one stage knows it. Move this code behind the "
        "last module, or into a module, or use strategy='smddp'."
    )


def _last_unit(graph: StepGraph) -> int:
    last = -1
    for node in graph.nodes:
        if node.module is not None:
            last = node.index
    return last


def _what_forbids(graph: StepGraph) -> str:
    """Where the step cannot be cut, and why: the first such place."""
    last_unit = _last_unit(graph)
    allowed = set(graph.cuts())
    for cut in range(1, last_unit + 1):
        if cut not in allowed:
            name = graph.nodes[cut].name
            reason = graph.obstacle_to(cut)
            return f" No stage may begin with {name}: {reason}."
    return ""


def _explained(error: PartitionError | None, modules: Modules, graph: StepGraph) -> SplitError:
    reasons = [f"{name!r} is opened, as {why}" for name, why in modules.obstacles.items()]
    reasons += [f"{name!r} is placed whole, as {why}" for name, why in modules.must_be_whole.items()]
    hint = ""
    if reasons:
        listed = "; ".join(reasons[:_NAMED])
        hint = f" Of the modules, {listed}."
    return SplitError(f"{error}.{_what_forbids(graph)}{hint}")


def homes_of(graph: StepGraph, stage_cuts: StageCuts, all_parameters: Collection[str]) -> dict[str, tuple[int, ...]]:
    """For each parameter the stages that use it; those that no node uses go to that of a twin, or of neighbours."""
    homes: dict[str, set[int]] = {}
    for stage, node in stage_cuts.nodes_by_stage(graph):
        for name in node.parameters:
            homes.setdefault(name, set()).add(stage)
    placed = {name: tuple(sorted(stages)) for name, stages in homes.items()}
    # Those that no node uses have to be somewhere, too: hooks and other steps may use them.
    for name in all_parameters:
        if name in placed:
            continue
        twin = _twin(name, homes)
        if twin is not None:
            stage = min(homes[twin])
        else:
            stage = neighbour_stage(name, homes)
        placed[name] = (stage,)
    return placed


def _twin(name: str, homes: Mapping[str, Collection[int]]) -> str | None:
    """A parameter that the step uses whose name ends as ``name`` does, in two parts or more; the most alike one.

    A teacher that follows a student, or an average of the weights, is a copy of modules under another name. Beside
    the original nothing has to be sent to update it.
    """
    # "teacher.layers.0.weight" and "student.layers.0.weight" end alike in three parts. One alone ("weight") says
    # nothing.
    parts = name.split(".")
    best = None
    most = 1
    for other in homes:
        common = _common_ending(parts, other.split("."))
        if common > most:
            best = other
            most = common
    return best


def _common_ending(one: Sequence[str], other: Sequence[str]) -> int:
    """How many of the last members are equal."""
    count = 0
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def neighbour_stage(name: str, homes: Mapping[str, Collection[int]]) -> int:
    """The first stage of the parameters that are nearest to ``name`` in the tree of modules."""
    # From the innermost module that holds it outwards: the first that has a parameter with a stage.
    prefix = name
    while "." in prefix:
        prefix = prefix.rpartition(".")[0]
        near: set[int] = set()
        for other, stages in homes.items():
            if other.startswith(f"{prefix}."):
                near.update(stages)
        if near:
            return min(near)
    return 0


def follow(graph: StepGraph, homes: Mapping[str, tuple[int, ...]], num_stages: int) -> StageCuts:
    """Cut another step (validation, say) so that each stage uses its own parameters only.

    Raises:
        SplitError: the step needs stages in another order than the one that the parameters were placed for.
    """
    _refuse_readers(graph)
    # Stages only ascend through a step: each node is done by the first stage from here on that has all its parameters.
    stages = []
    stage = 0
    for node in graph.nodes:
        if node.parameters:
            holders = set(range(num_stages))
            for name in node.parameters:
                holders.intersection_update(homes[name])
            later = [holder for holder in holders if holder >= stage]
            if not later:
                raise SplitError(_in_another_order(node, stage, holders))
            stage = min(later)
        stages.append(stage)
    cuts = _cheapest_cuts(graph, stages, num_stages)
    return StageCuts.at(graph, cuts)


def _in_another_order(node: Node, stage: int, holders: Collection[int]) -> str:
    stages_text = ", ".join(map(str, sorted(holders))) or "different ones"
    return (
        f"{node.name} is used behind units of stage {stage}, but its parameters are on stage "
        f"{stages_text}: this step uses the modules in another order than the one that the model was split "
        "by. Use the same order in all steps, or strategy='smddp'."
    )


def _cheapest_cuts(graph: StepGraph, stages: Sequence[int], num_stages: int) -> list[int]:
    """First nodes of the stages 1..: between the last node that must be earlier and the first that must not."""
    with_parameters = [node.index for node in graph.nodes if node.parameters]
    if not with_parameters:
        return [0] * (num_stages - 1)  # a step that uses no parameter is the last stage's alone
    cuts: list[int] = []
    for stage in range(1, num_stages):
        # Nodes without parameters lie between the last node of an earlier stage and the first of this or a later one,
        # and may be on either side: the cut is where the fewest bytes cross.
        earlier = [index for index in with_parameters if stages[index] < stage]
        later = [index for index in with_parameters if stages[index] >= stage]
        low = 1
        if earlier:
            low = max(earlier) + 1
        high = len(stages) - 1
        if later:
            high = min(later)
        first = max([low, *cuts])
        last = max(high, low)
        allowed = [cut for cut in unit_starts(graph) if first <= cut <= last]
        if not allowed:  # the stage has no unit in this step
            allowed = [cut for cut in graph.cuts() if first <= cut <= last]
        if not allowed:
            before = graph.nodes[low - 1].name
            behind = graph.nodes[high].name
            raise SplitError(
                f"This step cannot be cut where stage {stage} begins, between {before} and {behind}."
                f"{_what_forbids(graph)}"
            )
        cheapest = min(allowed, key=lambda cut: nbytes(graph, boundary_values(graph, cut)))
        cuts.append(cheapest)
    return cuts


def is_within(units: Collection[str]) -> IsSmall:
    """The predicate for :func:`build_graph` that makes just ``units`` units."""
    names = frozenset(units)
    return names.__contains__
