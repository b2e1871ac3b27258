"""Cutting a step into pipeline stages: the best cuts by measured times, or the user's own.

The best are found by dynamic programming over (stage, end of the stage): stages are judged one by one, each with a
limit of its own for what it may hold.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_smddp.planner.problem import PICOSECONDS, NodeCost, PartitionError, PartitionProblem, StageCosts
from lightning_smddp.wording import counted

Cost = Callable[[int, int, int], int]  # of (stage, start, end)


def most_stages(costs: StageCosts) -> tuple[int, list[tuple[int, int]]]:
    """How many stages the allowed cuts can make, and the runs of nodes with several units and no cut inside."""
    # As soon as a stage has a unit it ends, if there is one left for the stages behind it: no other way makes more.
    n = costs.num_nodes
    count = 0
    uncut = []
    start = 0
    for end in range(1, n + 1):
        units = costs.units[end] - costs.units[start]
        if units == 0:
            continue
        if end < n and not (costs.is_allowed[end] and costs.has_unit(end, n)):
            continue
        count += 1
        if units > 1:
            uncut.append((start, end))
        start = end
    return count, uncut


def fastest_stage(costs: StageCosts, limits: Sequence[float]) -> int | None:
    """Picoseconds of the slowest stage in the best partition; None if some stage is always over its limit."""

    def compute(stage: int, start: int, end: int) -> int:
        return costs.compute[end] - costs.compute[start]

    found = _smallest_worst(costs, costs.seconds, compute, limits)
    return None if found is None else found[0]


def least_memory(costs: StageCosts) -> tuple[int, ...]:
    """Cuts whose biggest stage, in bytes and times the stages of its rank, is smallest."""

    def memory(stage: int, start: int, end: int) -> int:
        return costs.memory(stage, start, end) * costs.stages_beside[stage]

    found = _smallest_worst(costs, memory, memory, [math.inf] * costs.num_stages)
    assert found is not None
    return found[1]


def _smallest_worst(
    costs: StageCosts, cost: Cost, bound: Cost, limits: Sequence[float]
) -> tuple[int, tuple[int, ...]] | None:
    """(worst cost of a stage, cuts) of the partition whose worst stage is best.

    ``bound`` is at most ``cost`` and grows with the stage, so that a start can be given up early.
    """
    # By node, of the nodes before it in the stages so far: (cost of the worst stage, starts of the stages). A node that
    # no cuts reach is missing.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(costs.num_stages):
        before, best = best, {}
        for end in costs.ends(stage):
            smallest: float = math.inf
            # Both the bound and the memory grow as the start goes down: once one is too much, it stays so.
            for start in range(end - 1, -1, -1):
                if bound(stage, start, end) >= smallest:
                    break
                if start not in before or not costs.has_unit(start, end):
                    continue
                if costs.memory(stage, start, end) > limits[stage]:
                    break
                worst, starts = before[start]
                value = max(worst, cost(stage, start, end))
                if value < smallest:
                    smallest = value
                    best[end] = (value, (*starts, start))
    if costs.num_nodes not in best:
        return None
    worst, (_, *cuts) = best[costs.num_nodes]
    return worst, tuple(cuts)


def best_cuts(costs: StageCosts, slowest: int, limits: Sequence[float]) -> tuple[int, ...]:
    """Cuts of the best partition of which no stage takes more than ``slowest`` picoseconds.

    With one stage on each rank the slowest one sets the pace, whatever the others take: it is the partition that sends
    the fewest bytes. With several on a rank their sum does, so even stages come first (the least sum of squared times).
    The earliest cuts among equals.
    """
    evens = not costs.is_one_stage_per_rank
    # As in `_smallest_worst`: (sum of squared times, bytes sent, starts of the stages). Tuples compare in that order.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(costs.num_stages):
        before, best = best, {}
        for end in costs.ends(stage):
            ways = []
            # Computing grows as the start goes down; a boundary's time does not.
            for start in range(end - 1, -1, -1):
                if costs.compute[end] - costs.compute[start] > slowest:
                    break
                if start not in before or not costs.has_unit(start, end):
                    continue
                seconds = costs.seconds(stage, start, end)
                if seconds > slowest or costs.memory(stage, start, end) > limits[stage]:
                    continue
                squares, sent, starts = before[start]
                if evens:
                    squares += seconds**2
                ways.append((squares, sent + costs.sent_bytes(stage, start), (*starts, start)))
            if ways:
                best[end] = min(ways)
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

    Of several with as fast a slowest stage it is the one that sends the fewest bytes, or where ranks hold several
    stages, the one with the most even stages. For n nodes and S stages this is dynamic programming over (stage, end):
    O(S n^2) at worst, O(n^2 log S) where stages are balanced.

    Where that is over the memory limit it is the best of those whose stages each keep to an equal share of their rank's
    memory. Where no partition does, the one whose biggest share is smallest is taken, if every rank's sum is under the
    limit.

    Raises:
        PartitionError: with more stages than units, when forbidden cuts leave too few stages, or when the memory
            limit cannot be met.
    """
    costs = StageCosts(problem)
    _check_enough_units(costs)
    limit = math.inf if problem.memory_limit is None else problem.memory_limit
    # The limit holds for a rank's sum, but the search judges stages one by one: so first without a limit, then with an
    # equal share of the rank's for each of its stages. Either result is kept if its sums are under the limit.
    unlimited = [math.inf] * costs.num_stages
    shares = [limit / count for count in costs.stages_beside]
    for limits in (unlimited, shares):
        slowest = fastest_stage(costs, limits)
        if slowest is None:
            continue
        found = _evaluate(costs, best_cuts(costs, slowest, limits))
        if max(found.rank_memory.values()) <= limit:
            return found
    smallest = _evaluate(costs, least_memory(costs))
    needed = max(smallest.rank_memory.values())
    if needed > limit:
        raise _memory_error(costs, needed)
    return smallest


def partition_at(problem: PartitionProblem, cuts: Sequence[int]) -> Partition:
    """The partition with these cuts, which increase, whatever it costs: a memory limit is not enforced.

    Raises:
        PartitionError: for a stage without a unit, or a cut where none is possible.
    """
    costs = StageCosts(problem)
    for cut in cuts:
        if not costs.is_allowed[cut]:
            before = problem.nodes[cut - 1].name
            after = problem.nodes[cut].name
            raise PartitionError(f"the step cannot be cut between {before!r} and {after!r}")
    for stage, (start, end) in enumerate(_bounds(cuts, costs.num_nodes)):
        if not costs.has_unit(start, end):
            raise PartitionError(f"stage {stage} would have no unit: it begins at {problem.nodes[start].name!r}")
    return _evaluate(costs, tuple(cuts))


def given_partition(problem: PartitionProblem, split: Sequence[str]) -> Partition:
    """The partition whose stages, but the first, begin at the nodes that ``split`` names.

    A name stands for the first node of that name or, as a prefix ("blocks.2"), for the first node inside it.

    Raises:
        PartitionError: for unknown names (with close matches and all valid names), a wrong number of names, names
            that are not in execution order, and cuts that are not possible.
    """
    shown = list(split)
    if len(split) != problem.num_stages - 1:
        made = counted(len(split) + 1, "stage")
        raise PartitionError(
            f"split={shown} makes {made}, but {problem.num_stages} were asked for: name the first unit of each"
            " stage but the first"
        )
    cuts = [_find(name, problem.nodes) for name in split]
    if cuts and cuts[0] == 0:
        raise PartitionError(f"split={shown}: {split[0]!r} is where the first stage begins; name later units only")
    ascending = sorted(set(cuts))
    if cuts != ascending:
        names = dict.fromkeys(split)
        order = sorted(names, key=lambda name: _find(name, problem.nodes))
        raise PartitionError(f"split={shown} must name different units in execution order, which is {order}")
    return partition_at(problem, cuts)


def _find(name: str, nodes: Sequence[NodeCost]) -> int:
    for index, node in enumerate(nodes):
        if node.name == name or node.name.startswith(f"{name}."):
            return index
    # The name may also be a slip in that of a module around units, which is no node itself.
    names = list(dict.fromkeys(node.name for node in nodes))
    prefixes = {prefix for known in names for prefix in accumulate(known.split("."), "{}.{}".format)}
    close = difflib.get_close_matches(name, sorted(prefixes))
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    units = ", ".join(names)
    raise PartitionError(f"split names {name!r}, which the step does not call{hint} Units, in order: {units}")


def _bounds(cuts: Sequence[int], num_nodes: int) -> list[tuple[int, int]]:
    """(first node, node after the last) of each stage."""
    return list(pairwise([0, *cuts, num_nodes]))


def _evaluate(costs: StageCosts, cuts: tuple[int, ...]) -> Partition:
    bounds = _bounds(cuts, costs.num_nodes)
    seconds = []
    memory = []
    stages_of: dict[int, list[int]] = {}
    for stage, (start, end) in enumerate(bounds):
        picoseconds = costs.seconds(stage, start, end)
        seconds.append(picoseconds / PICOSECONDS)
        memory.append(costs.memory(stage, start, end))
        rank = costs.problem.rank_of_stage[stage]
        stages_of.setdefault(rank, []).append(stage)
    rank_memory = {rank: _rank_memory(costs, stages_of[rank], bounds) for rank in sorted(stages_of)}
    return Partition(cuts, tuple(seconds), tuple(memory), rank_memory)


def _rank_memory(costs: StageCosts, stages: Iterable[int], bounds: Sequence[tuple[int, int]]) -> int:
    """Bytes of a rank with these stages: a tied parameter that several of them name is there once."""
    # `memory` of each stage by itself would count such a parameter once for each of them.
    total = 0
    tied: set[str] = set()
    for stage in stages:
        start, end = bounds[stage]
        total += costs.untied_bytes(stage, start, end)
        tied.update(*costs.tied[start:end])
    return total + costs.bytes_of(tied)


def _check_enough_units(costs: StageCosts) -> None:
    nodes = costs.problem.nodes
    wanted = costs.num_stages
    possible, runs = most_stages(costs)
    if wanted <= possible:
        return
    where = "; ".join(f"from {nodes[start].name!r} to {nodes[end - 1].name!r}" for start, end in runs)
    why = f"can be cut into at most {possible}: no cut is possible {where}"
    units = [node.name for node in nodes if node.is_unit]
    if wanted > len(units):
        possible = len(units)
        why = f"has only {counted(possible, 'unit')} ({', '.join(units) or 'none'})"
    raise PartitionError(
        f"{wanted} stages were asked for, but the step {why}: lower pipeline_parallel_size or stages_per_rank so that"
        f" their product is at most {possible}, or let bigger units be opened"
    )


def _memory_error(costs: StageCosts, needed: int) -> PartitionError:
    # With several stages on a rank a smaller limit may do, as `least_memory` looks at one stage after the other.
    limit = costs.problem.memory_limit
    assert limit is not None
    fewest = min(costs.problem.in_flight)
    biggest, name = max((costs.memory_of_node(node, fewest), node.name) for node in costs.problem.nodes)
    which = "the smallest limit that would do" if costs.is_one_stage_per_rank else "a limit that would do"
    alone = f"; unit {name!r} alone needs {_size(biggest)}" if biggest > limit else ""
    return PartitionError(
        f"found no partition into {costs.num_stages} stages that keeps every rank under its memory_limit_gb,"
        f" {_size(limit)}; {which} is {_size(needed)}{alone}. Use more stages, activation checkpointing, or smaller"
        f" micro-batches (more of them, or a smaller batch)"
    )


def _size(size: float) -> str:
    """Bytes, and GiB rounded up."""
    return f"{math.ceil(size)} bytes ({math.ceil(size / 2**30 * 1e4) / 1e4:g} GiB)"
