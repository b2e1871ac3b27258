"""Which modules are placed whole, and where the step is cut: decided once, by one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_smddp.pipeline.activations import Checkpointing
from lightning_smddp.pipeline.capture.boundaries import reason_not_to_cut, starts_of_stages
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.records import Trace
from lightning_smddp.pipeline.partition.costs import NodeTimes, problem_of
from lightning_smddp.planner.partition import Partition, best_partition, given_partition
from lightning_smddp.planner.problem import Cluster, PartitionError

_BALANCED = 1.03  # a slowest stage this close to the mean is not worth opening more modules,
_NEGLIGIBLE = 5  # nor is one that is slower by as many messages' latencies: times vary as much
_PARTS = (2, 4, 8, 16, 32, math.inf)  # of a stage: in turn modules that take more of its time than one are opened
_GAIN = 0.95  # where the slowest stage takes less than this share of the best one's time: more units cost time, too
_NAMED = 5  # modules that an error message explains


def choose_units(
    trace: Trace,
    modules: Modules,
    cluster: Cluster,
    split: Sequence[str] | None,
    checkpointing: Checkpointing,
) -> StepGraph:
    """Open modules, the longest first, until the stages balance; returns the graph with the units that remain.

    Raises:
        SplitError: there is no way to make so many stages; the message says why.
    """
    if split is not None:  # no more is opened than what has to be for stages to begin at the named modules
        opened = {name for name in modules.calls for wanted in split if wanted.startswith(f"{name}.")}
        return build_graph(trace, modules, modules.calls.keys() - opened)
    total = sum(modules.seconds(call.module) for call in trace.calls if not call.calls)
    best: StepGraph | None = None
    best_seconds = math.inf
    for parts in _PARTS:
        if parts == math.inf and best is not None:
            break
        long = [name for name in modules.calls if modules.seconds(name) * parts * cluster.num_stages > total]
        units = modules.calls.keys() - {name for name in long if _can_open(name, modules)}
        graph = build_graph(trace, modules, units)
        try:
            found = best_partition(problem_of(graph, cluster, NodeTimes.of_trace(graph), checkpointing))
        except PartitionError as failure:  # too few units, say
            error = failure
            continue
        slowest = max(found.stage_seconds)
        if slowest < _GAIN * best_seconds:
            best, best_seconds = graph, slowest
        if _is_balanced(found, cluster):
            break
    if best is None:
        raise _explained(error, modules, graph)
    return best


def _is_balanced(partition: Partition, cluster: Cluster) -> bool:
    # A pipeline is as fast as its slowest stage, and no partition makes that faster than the mean.
    mean = sum(partition.stage_seconds) / cluster.num_stages
    latency = max((link.latency_s for link in cluster.links), default=0.0)
    limit = max(_BALANCED * mean, mean + _NEGLIGIBLE * latency)
    return max(partition.stage_seconds) <= limit


def _can_open(name: str, modules: Modules) -> bool:
    return name not in modules.must_be_whole and any(inner.startswith(f"{name}.") for inner in modules.calls)


def choose_cuts(
    graph: StepGraph,
    cluster: Cluster,
    times: NodeTimes,
    split: Sequence[str] | None,
    checkpointing: Checkpointing,
) -> Partition:
    """Cut ``graph`` into stages, at the named units or where it is best.

    Raises:
        SplitError: no partition is possible; the message says why.
    """
    problem = problem_of(graph, cluster, times, checkpointing)
    try:
        if split is None:
            return best_partition(problem)
        return given_partition(problem, split)
    except PartitionError as error:
        raise SplitError(f"{error}.{what_forbids(graph)}") from error


def what_forbids(graph: StepGraph) -> str:
    """Where the step cannot be cut, and why: the first such place."""
    for cut in starts_of_stages(graph):
        reason = reason_not_to_cut(graph, cut)
        if reason is not None:
            return f" No stage may begin with {graph.nodes[cut].name}: {reason}."
    return ""


def _explained(error: PartitionError, modules: Modules, graph: StepGraph) -> SplitError:
    reasons = [f"{name!r} is opened, as {why}" for name, why in modules.not_placeable.items()]
    reasons += [f"{name!r} is placed whole, as {why}" for name, why in modules.must_be_whole.items()]
    hint = f" Of the modules, {'; '.join(reasons[:_NAMED])}." if reasons else ""
    return SplitError(f"{error}.{what_forbids(graph)}{hint}")
