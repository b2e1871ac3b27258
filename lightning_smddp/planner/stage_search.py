"""The best partition, by dynamic programming over (stage, end of the stage).

Stages are judged one by one, each with a limit of its own for what it may hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from lightning_smddp.planner.problem import StageCosts

Windows = list[dict[int, list[int]]]  # for each stage: first node -> possible ends
Cost = Callable[[int, int, int], int]  # of (stage, start, end)


def most_stages(costs: StageCosts) -> tuple[int, list[tuple[int, int]]]:
    """How many stages the allowed cuts can make, and the runs of nodes with several units and no cut inside."""
    n = costs.num_nodes
    bounds, start = [], 0
    for end in range(1, n + 1):
        may_end = end == n or (costs.is_allowed[end] and costs.has_unit(end, n))
        if may_end and costs.has_unit(start, end):
            bounds.append((start, end))
            start = end
    uncut = [(start, end) for start, end in bounds if costs.units[end] - costs.units[start] > 1]
    return len(bounds), uncut


def fastest_stage(costs: StageCosts, limits: Sequence[float]) -> int | None:
    """Picoseconds of the slowest stage in the best partition; None if some stage is always over its limit."""

    def compute(stage: int, start: int, end: int) -> int:
        return costs.compute[end] - costs.compute[start]

    found = _smallest_worst(costs, costs.seconds, compute, limits)
    if found is None:
        return None
    seconds, _ = found
    return seconds


def least_memory(costs: StageCosts) -> tuple[int, ...]:
    """Cuts whose biggest stage, in bytes and times the stages of its rank, is smallest."""

    def memory(stage: int, start: int, end: int) -> int:
        return costs.memory(stage, start, end) * costs.stages_beside[stage]

    found = _smallest_worst(costs, memory, memory, [math.inf] * costs.num_stages)
    assert found is not None
    _, cuts = found
    return cuts


def _smallest_worst(
    costs: StageCosts, cost: Cost, bound: Cost, limits: Sequence[float]
) -> tuple[int, tuple[int, ...]] | None:
    """(worst cost of a stage, cuts) of the partition whose worst stage is best.

    ``bound`` is at most ``cost`` and grows with the stage, so that a start can be given up early.
    """
    # worst[s][i]: of the best cuts of the nodes before i into s stages, the cost of the worst one. choice[s][j]: where
    # stage s starts if it ends at j in the best cuts.
    n, last = costs.num_nodes, costs.num_stages - 1
    worst: list[dict[int, int]] = [{0: 0}]
    choice: list[dict[int, int]] = []
    for stage in range(costs.num_stages):
        worst.append({})
        choice.append({})
        ends = [n]
        if stage < last:
            ends = [end for end in range(1, n) if costs.is_allowed[end]]
        for end in ends:
            best = math.inf
            for start in range(end - 1, -1, -1):
                if bound(stage, start, end) >= best:
                    break
                if costs.memory(stage, start, end) > limits[stage]:
                    break
                before = worst[stage].get(start)
                if before is None or not costs.has_unit(start, end):
                    continue
                value = max(before, cost(stage, start, end))
                if value < best:
                    best = worst[-1][end] = value
                    choice[stage][end] = start
    if n not in worst[-1]:
        return None
    cuts = [n]
    for stage in range(last, 0, -1):
        cuts.append(choice[stage][cuts[-1]])
    return worst[-1][n], tuple(reversed(cuts[1:]))


def windows(costs: StageCosts, slowest: int, limits: Sequence[float]) -> Windows:
    """All stages that take at most ``slowest`` picoseconds, fit their limits and are part of some whole partition."""
    found: Windows = []
    starts = {0}
    for stage in range(costs.num_stages):
        ends = {start: list(_ends(costs, stage, start, slowest, limits[stage])) for start in sorted(starts)}
        found.append(ends)
        starts = set(chain.from_iterable(ends.values()))
    return _still_whole(found, costs.num_nodes)


def _still_whole(stages: Windows, num_nodes: int) -> Windows:
    """Those of the ``stages`` that can be followed by others up to the last node."""
    alive = {num_nodes}
    result: Windows = []
    for found in reversed(stages):
        kept = {start: [end for end in ends if end in alive] for start, ends in found.items()}
        result.append({start: ends for start, ends in kept.items() if ends})
        alive = set(result[-1])
    return result[::-1]


def _ends(costs: StageCosts, stage: int, start: int, slowest: int, limit: float) -> Iterator[int]:
    n = costs.num_nodes
    ends: Iterable[int] = range(start + 1, n)
    if stage == costs.num_stages - 1:
        ends = [n]
    for end in ends:
        if costs.compute[end] - costs.compute[start] > slowest:
            return
        if costs.memory(stage, start, end) > limit:
            return
        if not (costs.is_allowed[end] or end == n) or not costs.has_unit(start, end):
            continue
        if costs.seconds(stage, start, end) <= slowest:
            yield end


def best_of(costs: StageCosts, stages: Windows) -> tuple[int, ...]:
    """Cuts of the best partition made of ``stages``, none of which is slower than the slowest one has to be.

    With one stage on each rank the slowest one sets the pace, whatever the others take: it is the partition that sends
    the fewest bytes. With several on a rank their sum does, so even stages come first (the least sum of squared times).
    The earliest cuts among equals.
    """
    evens = not costs.is_one_stage_per_rank
    # by the node that a stage starts at: (sum of squared times, bytes sent, cuts) of the best way from there to the end
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {costs.num_nodes: (0, 0, ())}
    for stage in reversed(range(costs.num_stages)):
        following, best = best, {}
        for start, ends in stages[stage].items():
            ways = []
            for end in ends:
                squares, sent, cuts = following[end]
                if evens:
                    squares += costs.seconds(stage, start, end) ** 2
                ways.append((squares, sent, cuts))
            squares, sent, cuts = min(ways)
            if stage > 0:
                cuts = (start, *cuts)
            best[start] = squares, sent + costs.sent_bytes(stage, start), cuts
    return best[0][2]
