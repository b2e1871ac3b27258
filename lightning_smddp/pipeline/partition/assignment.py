"""Which stages, and so which ranks, have which parameters and buffers; other steps cut so that they fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from os.path import commonprefix

from lightning_smddp.pipeline.capture.boundaries import boundary_bytes, possible_cuts
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.partition.cuts import StageCuts
from lightning_smddp.pipeline.partition.resources import Resources
from lightning_smddp.pipeline.partition.split import what_forbids


def homes_of(graph: StepGraph, stage_cuts: StageCuts, all_parameters: Collection[str]) -> dict[str, tuple[int, ...]]:
    """For each parameter the stages that use it; those that no node uses go to that of a twin, or of neighbours."""
    homes: dict[str, set[int]] = defaultdict(set)
    for stage, node in stage_cuts.nodes_by_stage(graph):
        for name in node.parameters:
            homes[name].add(stage)
    placed = {name: tuple(sorted(stages)) for name, stages in homes.items()}
    # Those that no node uses have to be somewhere, too: hooks and other steps may use them.
    for name in all_parameters:
        if name not in placed:
            twin = _twin(name, homes)
            placed[name] = (neighbour_stage(name, homes) if twin is None else min(homes[twin]),)
    return placed


def _twin(name: str, homes: Mapping[str, Collection[int]]) -> str | None:
    """A parameter that the step uses whose name ends as ``name`` does, in two parts or more; the most alike one.

    A teacher that follows a student, or an average of the weights, is a copy of modules under another name. Beside
    the original nothing has to be sent to update it.
    """

    # "teacher.layers.0.weight" and "student.layers.0.weight" end alike in three parts. One alone ("weight") says
    # nothing.
    def common_parts(other: str) -> int:
        return len(commonprefix([name.split(".")[::-1], other.split(".")[::-1]]))

    best = max(homes, key=common_parts, default=name)
    return best if best != name and common_parts(best) > 1 else None


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
    # Stages only ascend through a step. Parameters that several stages have leave room: a node is done by a stage
    # between the earliest that may do it after the nodes before, and the latest that may before the nodes after.
    used = [node.index for node in graph.nodes if node.parameters]
    holders = {index: _holders(graph.nodes[index].parameters, homes, num_stages) for index in used}
    earliest: dict[int, int] = {}
    stage = 0
    for index in used:
        later = [holder for holder in holders[index] if holder >= stage]
        if not later:
            where = ", ".join(map(str, sorted(holders[index]))) or "different ones"
            raise SplitError(
                f"{graph.nodes[index].name} is used behind units of stage {stage}, but its parameters are on stage "
                f"{where}: this step uses the modules in another order than the one that the model was split by. Use "
                "the same order in all steps, or strategy='smddp'."
            )
        stage = earliest[index] = min(later)
    latest: dict[int, int] = {}
    stage = num_stages - 1
    for index in reversed(used):
        stage = latest[index] = max(holder for holder in holders[index] if holder <= stage)
    return StageCuts.at(graph, _cheapest_cuts(graph, holders, earliest, latest, num_stages))


def _holders(parameters: Collection[str], homes: Mapping[str, tuple[int, ...]], num_stages: int) -> set[int]:
    """The stages that have all of them."""
    return set(range(num_stages)).intersection(*(homes[name] for name in parameters))


def _cheapest_cuts(
    graph: StepGraph,
    holders: Mapping[int, set[int]],
    earliest: Mapping[int, int],
    latest: Mapping[int, int],
    num_stages: int,
) -> list[int]:
    """First nodes of the stages 1..: between the last node that must be earlier and the first that must not."""
    if not holders:
        return [0] * (num_stages - 1)  # a step that uses no parameter is the last stage's alone
    cuts: list[int] = []
    for stage in range(1, num_stages):
        # Nodes without parameters lie between the last node of an earlier stage and the first of this or a later one,
        # and may be on either side: the cut is where the fewest bytes cross.
        low = max((index for index in holders if latest[index] < stage), default=0) + 1
        high = min((index for index in holders if earliest[index] >= stage), default=len(graph.nodes) - 1)
        first = max([low, *cuts])
        last = max(high, low)
        # The stage before has all parameters of its nodes.
        begin = cuts[-1] if cuts else 0
        end = min((index for index in holders if index >= begin and stage - 1 not in holders[index]), default=last)
        allowed = [cut for cut in possible_cuts(graph) if first <= cut <= min(last, end)]
        if not allowed:
            raise SplitError(
                f"This step cannot be cut where stage {stage} begins, between {graph.nodes[low - 1].name} and "
                f"{graph.nodes[high].name}.{what_forbids(graph)}"
            )
        cuts.append(min(allowed, key=lambda cut: boundary_bytes(graph, cut)))
    return cuts


def ownership_of(
    graph: StepGraph,
    stage_cuts: StageCuts,
    homes: Mapping[str, Sequence[int]],
    resources: Resources,
    all_buffers: Sequence[str] = (),
) -> Ownership:
    """Ranks instead of stages.

    A buffer that the step changes belongs to the rank of the node that does. Others may be changed by a later step (a
    BatchNorm that is unfrozen): they belong to where they are read, else to where parameters near them are.
    """
    ranks = resources.rank_of_stage
    buffers: dict[str, int] = {}
    units: dict[str, int] = {}  # and their stages
    for stage, node in stage_cuts.nodes_by_stage(graph):
        if node.module is not None:
            units[node.module] = stage
        for name in node.buffers:
            other = buffers.setdefault(name, ranks[stage])
            if other != ranks[stage]:
                raise SplitError(
                    f"Buffer {name!r} is changed on ranks {other} and {ranks[stage]} of the pipeline: the "
                    "module that changes it is called in several stages. Cut elsewhere by `split=`."
                )
    for name in all_buffers:
        if name not in buffers:
            stage = _stage_of_buffer(name, units, homes)
            buffers[name] = ranks[stage]
    parameters = {}
    for name, stages in homes.items():
        holders = [ranks[stage] for stage in stages]
        parameters[name] = tuple(dict.fromkeys(holders))  # several stages may be on one rank
    return Ownership(parameters, buffers, max(ranks) + 1)


def _stage_of_buffer(name: str, units: Mapping[str, int], homes: Mapping[str, Sequence[int]]) -> int:
    for unit, stage in units.items():
        if name.startswith(f"{unit}."):
            return stage
    return neighbour_stage(name, homes)
