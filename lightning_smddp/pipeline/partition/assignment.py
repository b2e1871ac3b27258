"""Which stages, and so which ranks, have which parameters and buffers; where another step is cut for these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import TypeAlias

from lightning_smddp.pipeline.capture.boundaries import StagePlan, cut_into_stages, possible_cuts
from lightning_smddp.pipeline.capture.graph import Node, SplitError, StepGraph
from lightning_smddp.pipeline.capture.records import each_once
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.partition.split import what_forbids

Stages: TypeAlias = tuple[int, ...]
"""Of one parameter: those that use it, ascending."""
ParameterStages: TypeAlias = Mapping[str, Stages]


def nodes_by_stage(graph: StepGraph, stages: Sequence[StagePlan]) -> Iterator[tuple[int, Node]]:
    """All nodes of ``graph`` in order, each with the stage that it belongs to."""
    for plan in stages:
        for node in graph.nodes[plan.begin : plan.end]:
            yield plan.stage, node


def parameter_stages_of(
    graph: StepGraph, stages: Sequence[StagePlan], all_parameters: Sequence[str]
) -> dict[str, Stages]:
    """For each parameter, in the order of ``all_parameters``, the stages that use it.

    Those that no node uses have to be somewhere, too: hooks, other steps and other paths of the step may use them.
    """
    used: dict[str, Stages] = {}
    for stage, node in nodes_by_stage(graph, stages):
        for name in node.parameters:
            used[name] = each_once(used.get(name, ()), [stage])
    return {name: used.get(name) or (_stage_of_idle(name, all_parameters, used),) for name in all_parameters}


def _stage_of_idle(name: str, all_parameters: Sequence[str], used: ParameterStages) -> int:
    """Where to place a parameter that is not used.

    Beside its twin: a teacher that follows a student, or an average of the weights, is a copy of a module under another
    name: of its parameters none is used, and the original has them all. What has no twin goes where its neighbours are:
    a layer of a list that was left out by chance would run between them, and other layers are no twins of it.
    """
    module, _, rest = name.partition(".")
    while "." in rest and not module.isdigit():  # one name ("weight") tells no twin, as many modules have it
        copied = name.removesuffix(rest)
        inside = [other.removeprefix(copied) for other in all_parameters if other.startswith(copied)]
        for twin in [other for other in used if other.endswith(f".{rest}")]:
            expected = {twin.removesuffix(rest) + one for one in inside}
            if expected.issubset(all_parameters) and used.keys().isdisjoint(copied + one for one in inside):
                return used[twin][0]
        module, _, rest = rest.partition(".")
    # Of equally near ones the last before it, else the first behind it.
    before = all_parameters[: all_parameters.index(name)]
    return _stage_near(name, {other: used[other] for other in [*reversed(before), *all_parameters] if other in used})


def follow(
    graph: StepGraph,
    parameter_stages: ParameterStages,
    ownership: Ownership,
    rank_of_stage: Sequence[int],
) -> tuple[StagePlan, ...]:
    """Cut another step (validation, say) as late as possible, where each stage has the parameters that it uses.

    It owns the buffers that it changes, too: those that other ranks get are the owner's.

    Raises:
        SplitError: the step needs stages in another order than the one that the parameters were placed for.
    """
    num_stages = len(rank_of_stage)
    if not any(node.parameters for node in graph.nodes):
        return cut_into_stages(graph, [0] * (num_stages - 1))  # a step that uses no parameter is the last stage's alone

    def end_of(stage: int, begin: int) -> int:
        """Behind the last node of a ``stage`` from ``begin`` on that has all it needs."""
        for node in graph.nodes[begin:]:
            others = any(
                ownership.buffers.get(name, rank_of_stage[stage]) != rank_of_stage[stage] for name in node.buffers
            )
            if others or any(stage not in parameter_stages[name] for name in node.parameters):
                return node.index
        return len(graph.nodes)

    cuts: list[int] = []
    begin = 0
    for stage in range(num_stages - 1):
        end = end_of(stage, begin)
        fitting = [cut for cut in possible_cuts(graph) if begin <= cut <= end]
        if fitting:
            begin = fitting[-1]
            cuts.append(begin)
    if end_of(num_stages - 1, begin) == len(graph.nodes) and len(cuts) == num_stages - 1:
        return cut_into_stages(graph, cuts)
    raise SplitError(
        f"This step cannot be cut so that each stage uses its own modules alone.{what_forbids(graph)} Use modules in "
        "the same order in all steps."
    )


def ownership_of(
    graph: StepGraph,
    stages: Sequence[StagePlan],
    parameter_stages: ParameterStages,
    rank_of_stage: Sequence[int],
    all_buffers: Collection[str],
) -> Ownership:
    """Ranks instead of stages.

    A buffer that the step changes belongs to the rank of the node that does. Others may be changed by a later step (a
    BatchNorm that is unfrozen): they belong to where their unit is, else to where parameters near them are.
    """
    places: dict[str, Stages] = {}  # of buffers that change, which are near to themselves, and of units
    for stage, node in nodes_by_stage(graph, stages):
        places.update(dict.fromkeys(each_once([node.module], node.buffers), (stage,)))
    places.update(parameter_stages)
    buffers = {name: rank_of_stage[_stage_near(name, places)] for name in all_buffers}
    parameters = {}
    for name, users in parameter_stages.items():
        parameters[name] = each_once(rank_of_stage[stage] for stage in users)  # a rank may have several
    return Ownership(parameters, buffers)


def _stage_near(name: str, stages: ParameterStages) -> int:
    """That of what is nearest to ``name`` in the tree of modules, of equally near ones the first."""
    path = name.split(".")
    nearest = max(stages, key=lambda other: len(commonprefix([path, other.split(".")])), default=None)
    return 0 if nearest is None else stages[nearest][0]
