"""Cutting a step into pipeline stages: the best cuts by measured times, or the user's own.

The best are found by dynamic programming over (stage, end of the stage): stages are judged one by one, each with a
limit of its own for what it may hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from lightning_smddp.planner.problem import PICOSECONDS, NodeCost, PartitionError, PartitionProblem, StageCosts
from lightning_smddp.wording import counted

Cost: TypeAlias = Callable[[int, int, int], int]  # of (stage, start, end)


def best_cuts(costs: StageCosts, cost: Cost, bound: Cost, limits: Sequence[float]) -> tuple[int, ...] | None:
    """Cuts of the partition whose worst stage is best; None if some stage is always over its limit.

    Of equal ones it is one with even stages (a small sum of squares), as ranks with several have to do all of them. The
    sum is the smallest for what comes before each stage, which need not be the smallest of all.

    Args:
        costs: of all stages.
        cost: what a stage is judged by.
        bound: is at most ``cost`` and grows with the stage, so that a start can be given up early.
        limits: bytes that each stage may hold.
    """
    # By node, of the nodes before it in the stages so far: (cost of the worst stage, sum of squared costs, starts of
    # the stages). Tuples compare in that order. A node that no cuts reach is missing.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(costs.num_stages):
        before, best = best, {}
        for end in costs.ends(stage):
            ways = []
            smallest: float = math.inf
            # Both the bound and the memory grow as the start goes down: once one is too much, it stays so.
            for start in range(end - 1, -1, -1):
                if bound(stage, start, end) > smallest:
                    break
                if start not in before or not costs.has_unit(start, end):
                    continue
                if costs.memory(stage, start, end) > limits[stage]:
                    break
                worst, squares, starts = before[start]
                value = cost(stage, start, end)
                worst = max(worst, value)
                smallest = min(smallest, worst)
                ways.append((worst, squares + value**2, (*starts, start)))
            if ways:
                best[end] = min(ways)
    if costs.num_nodes not in best:
        return None
    _, _, (_, *cuts) = best[costs.num_nodes]
    return tuple(cuts)


@dataclass(frozen=True)
class Partition:
    """A step cut into stages, and what each stage and rank then costs.

    Attributes:
        cuts: index of the first node of each stage but the first; increasing.
        stage_seconds: for a micro-batch, forward and backward and boundaries (see ``StageCosts``).
        stage_memory: bytes, a parameter counted once for each stage.
        rank_memory: bytes, a parameter counted once for each rank.
    """

    cuts: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    stage_memory: tuple[int, ...]
    rank_memory: dict[int, int]


def best_partition(problem: PartitionProblem) -> Partition:
    """The partition whose slowest stage is fastest, and which keeps every rank under the memory limit.

    Of several with as fast a slowest stage it is one with even stages. For n nodes and S stages this is dynamic
    programming over (stage, end): O(S n^2) at worst, O(n^2 log S) where stages are balanced.

    Where that is over the memory limit it is the best of those whose stages each keep to an equal share of their rank's
    memory. Where no partition does, the one whose biggest share is smallest is taken, if every rank's sum is under the
    limit.

    Raises:
        PartitionError: with more stages than units, when forbidden cuts leave too few stages, or when the memory
            limit cannot be met.
    """
    costs = StageCosts(problem)
    limit = math.inf if problem.memory_limit is None else problem.memory_limit
    # The limit holds for a rank's sum, but the search judges stages one by one: so first without a limit, then with an
    # equal share of the rank's for each of its stages, then by memory. What is under it is kept.
    unlimited = [math.inf] * costs.num_stages
    shares = [limit / count for count in costs.stages_beside]
    found = None
    for cost, bound, limits in (
        (costs.seconds, costs.computing, unlimited),
        (costs.seconds, costs.computing, shares),
        (costs.memory_beside, costs.memory_beside, unlimited),
    ):
        cuts = best_cuts(costs, cost, bound, limits)
        if cuts is not None:
            found = _evaluate(costs, cuts)
            if max(found.rank_memory.values()) <= limit:
                return found
    if found is None:
        units = counted(sum(node.is_unit for node in problem.nodes), "unit")
        places = counted(sum(costs.is_allowed), "place")
        raise PartitionError(
            f"{costs.num_stages} stages were asked for, but the step has {units}, and can be cut in {places}: lower"
            " pipeline_parallel_size or stages_per_rank"
        )
    needed = max(found.rank_memory.values())
    raise PartitionError(
        f"found no partition into {costs.num_stages} stages that keeps every rank under its memory_limit_gb,"
        f" {_size(limit)}; a limit that would do is {_size(needed)}. Use more stages, activation checkpointing, or"
        " smaller micro-batches (more of them, or a smaller batch)"
    )


def given_partition(problem: PartitionProblem, split: Sequence[str]) -> Partition:
    """The partition whose stages, but the first, begin at the nodes that ``split`` names, one each, whatever it costs.

    A name stands for the first node of that name or, as a prefix ("blocks.2"), for the first node inside it.

    Raises:
        PartitionError: for unknown names, names that are not in execution order, a stage without a unit, or a cut where
            none is possible.
    """
    starts = [0, *(_find(name, problem.nodes) for name in split)]
    if starts != sorted(set(starts)):
        raise PartitionError(
            f"split={list(split)} must name different units in execution order, and not the one that the first stage"
            " begins with"
        )
    costs = StageCosts(problem)
    for before, start in pairwise(starts):
        name = problem.nodes[start].name
        if not costs.is_allowed[start]:
            raise PartitionError(f"the step cannot be cut between {problem.nodes[start - 1].name!r} and {name!r}")
        if not costs.has_unit(before, start):
            raise PartitionError(f"the stage before {name!r} would have no unit")
    return _evaluate(costs, tuple(starts[1:]))


def _find(name: str, nodes: Sequence[NodeCost]) -> int:
    for index, node in enumerate(nodes):
        if node.name == name or node.name.startswith(f"{name}."):
            return index
    units = ", ".join(dict.fromkeys(node.name for node in nodes if node.is_unit))
    raise PartitionError(f"split names {name!r}, which the step does not call. Units, in order: {units}")


def _evaluate(costs: StageCosts, cuts: tuple[int, ...]) -> Partition:
    ranks = costs.problem.rank_of_stage
    stages = [(stage, *bounds) for stage, bounds in enumerate(pairwise([0, *cuts, costs.num_nodes]))]
    seconds = tuple(costs.seconds(*stage) / PICOSECONDS for stage in stages)
    rank_memory = {}
    for rank in ranks:
        own = [stage for stage in stages if ranks[stage[0]] == rank]
        named = {name for _, *ends in own for node in costs.problem.nodes[slice(*ends)] for name in node.parameters}
        rank_memory[rank] = sum(costs.held(*stage) for stage in own) + costs.bytes_of(named)  # a tied one once
    return Partition(cuts, seconds, tuple(costs.memory(*stage) for stage in stages), rank_memory)


def _size(size: float) -> str:
    """Bytes, and GiB rounded up."""
    return f"{math.ceil(size)} bytes ({math.ceil(size / 2**30 * 1e4) / 1e4:g} GiB)"
