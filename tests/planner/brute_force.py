"""The partition's definition, spelled out over every possible choice of cuts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import combinations

from lightning_smddp.planner.problem import PICOSECONDS, PartitionProblem


def possible_cuts(problem: PartitionProblem) -> Iterator[tuple[int, ...]]:
    n = len(problem.nodes)
    for cuts in combinations(range(1, n), problem.num_stages - 1):
        bounds = list(zip((0, *cuts), (*cuts, n), strict=True))
        if all(problem.cut_bytes[cut] < math.inf for cut in cuts) and all(
            any(node.is_unit for node in problem.nodes[a:b]) for a, b in bounds
        ):
            yield cuts


def boundary_ps(problem: PartitionProblem, stage: int, cut: int, mean: int) -> int:
    """Between ``stage - 1`` and ``stage``: picoseconds of messages that computing does not hide."""
    if problem.rank_of_stage[stage - 1] == problem.rank_of_stage[stage]:
        return 0
    link = problem.links[stage - 1]
    picoseconds = round(2 * (link.latency_s + problem.cut_bytes[cut] / link.bytes_per_s) * PICOSECONDS)
    return max(0, picoseconds - mean) if link.is_hidden else picoseconds


def stage_ps(problem: PartitionProblem, cuts: tuple[int, ...]) -> list[int]:
    seconds = [node.forward_s + node.backward_s for node in problem.nodes]
    bounds = zip((0, *cuts), (*cuts, len(problem.nodes)), strict=True)
    busy = [round(sum(seconds[a:b]) * PICOSECONDS) for a, b in bounds]
    mean = sum(busy) // len(busy)
    messages = [0, *(boundary_ps(problem, stage, cut, mean) for stage, cut in enumerate(cuts, start=1)), 0]
    both = max if all(link.is_hidden for link in problem.links) else sum
    return [computing + both(messages[stage : stage + 2]) for stage, computing in enumerate(busy)]


def rank_memory(problem: PartitionProblem, cuts: tuple[int, ...]) -> dict[int, int]:
    bounds = list(zip((0, *cuts), (*cuts, len(problem.nodes)), strict=True))
    memory = {}
    for rank in set(problem.rank_of_stage):
        names, total = set(), 0
        for stage, (a, b) in enumerate(bounds):
            if problem.rank_of_stage[stage] == rank:
                total += problem.in_flight[stage] * sum(node.activation_bytes for node in problem.nodes[a:b])
                names |= {name for node in problem.nodes[a:b] for name in node.parameters}
        memory[rank] = total + sum(problem.parameter_bytes[name] for name in names)
    return memory


def keeps_shares(problem: PartitionProblem, cuts: tuple[int, ...]) -> bool:
    """Whether each stage keeps to its share of its rank's memory, which the rank's stages divide equally."""
    if problem.memory_limit is None:
        return True
    alone = dataclasses.replace(problem, rank_of_stage=list(range(problem.num_stages)))
    shares = [problem.memory_limit / problem.rank_of_stage.count(rank) for rank in problem.rank_of_stage]
    return all(used <= share for used, share in zip(rank_memory(alone, cuts).values(), shares, strict=True))


def slowest(problem: PartitionProblem, cuts: tuple[int, ...]) -> int:
    return max(stage_ps(problem, cuts))


def best_of_all(problem: PartitionProblem) -> int | None:
    """The slowest stage of the best partition."""
    fitting = (cuts for cuts in possible_cuts(problem) if keeps_shares(problem, cuts))
    return min((slowest(problem, cuts) for cuts in fitting), default=None)
