"""The best partition against every possible one, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import pytest

from lightning_smddp.planner.partition import best_partition, given_partition
from lightning_smddp.planner.problem import Link, NodeCost, PartitionError, PartitionProblem
from tests.planner.brute_force import best_of_all, possible_cuts, rank_memory, slowest
from tests.planner.problems import FREE, PLACEMENTS, chain, random_problem

PLACES = pytest.mark.parametrize("placement", PLACEMENTS)


def tightened(problem: PartitionProblem, draw: random.Random) -> PartitionProblem:
    """With a limit somewhere from just too small to never reached."""
    every = [max(rank_memory(problem, cuts).values()) for cuts in possible_cuts(problem)]
    return dataclasses.replace(problem, memory_limit=draw.randint(min(every) - 2, max(every))) if every else problem


@PLACES
@pytest.mark.parametrize("limited", [False, True])
def test_equal_to_brute_force(placement: str, limited: bool) -> None:
    """The best of all where that fits, else the best of those whose stages keep to their shares of memory."""
    outcomes = Counter[str]()
    for seed in range(120):
        draw = random.Random(f"{placement} {seed}")
        problem = random_problem(
            seed,
            draw.randint(6, 11),
            PLACEMENTS[placement](draw.randint(1, 3)),
            tied=draw.choice([0, 0.4]),
            forbidden=draw.choice([0, 0.3]),
            non_units=draw.choice([0, 0.3]),
            largest=draw.choice([1, 9]),
        )
        if limited:
            problem = tightened(problem, draw)
        free, shared = best_of_all(dataclasses.replace(problem, memory_limit=None)), best_of_all(problem)
        try:
            found = best_partition(problem)
        except PartitionError:
            assert shared is None
            outcomes["refused"] += free is not None
            continue
        limit = math.inf if problem.memory_limit is None else problem.memory_limit
        assert max(rank_memory(problem, found.cuts).values()) <= limit
        assert shared is None or slowest(problem, found.cuts) in (free, shared)
        outcomes["free" if slowest(problem, found.cuts) == free else "shared" if shared else "smallest"] += 1
    assert outcomes["free"] > 20
    assert (outcomes["refused"] > 0) == limited
    assert outcomes["shared"] > 0 or placement == "three_loops" or not limited


def test_parameters_that_stages_of_a_rank_share_count_once() -> None:
    """Each of the two stages is over its share, their sum is not."""
    problem = chain(4, [0, 1, 1, 0], tied={0: "wte", 3: "wte"}, sizes={"wte": 100})
    limited = dataclasses.replace(problem, memory_limit=100)
    assert best_partition(limited).rank_memory == {0: 100, 1: 0}
    with pytest.raises(PartitionError, match="memory_limit_gb, 99 bytes"):
        best_partition(dataclasses.replace(problem, memory_limit=99))


def test_ranks_with_several_stages_get_even_ones_where_one_stage_is_slow_anyway() -> None:
    items = [
        NodeCost("embed", 1, 2, 0),
        *(NodeCost(f"net.{i}", 1, 2, 0) for i in range(7)),
        NodeCost("head", 10, 20, 0),
    ]
    problem = PartitionProblem([0, 1, 0, 1], [1] * 4, {}, [FREE] * 3, nodes=items, cut_bytes=[0] * 10)
    found = best_partition(problem)
    assert found.stage_seconds == (9, 9, 6, 30) or found.stage_seconds == (6, 9, 9, 30)


def test_boundaries_cost_both_ends_unless_they_share_a_rank() -> None:
    problem = chain(4, [0, 1, 1, 0], cut_bytes=[0, 10, 20, 30, 0], link=Link(1, 10))
    found = given_partition(problem, ["net.1", "net.2", "net.3"])
    assert found.stage_seconds == (3 + 4, 3 + 4, 3 + 8, 3 + 8)


def test_stages_are_even_also_where_messages_take_longer_than_computing() -> None:
    slow = chain(8, [0, 1, 2, 3], cut_bytes=[0] * 9, link=Link(100.0, 1.0, is_hidden=True))
    assert best_partition(slow).cuts == (2, 4, 6)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_memory_errors_name_the_smallest_limit(num_ranks: int) -> None:
    for seed in range(40):
        problem = random_problem(seed, 8, list(range(num_ranks)), tied=0.3)
        smallest = min(max(rank_memory(problem, cuts).values()) for cuts in possible_cuts(problem))
        assert max(best_partition(dataclasses.replace(problem, memory_limit=smallest)).rank_memory.values()) == smallest
        with pytest.raises(PartitionError, match=rf"a limit that would do is {smallest} bytes\b.*checkpointing"):
            best_partition(dataclasses.replace(problem, memory_limit=smallest - 0.5))


def test_more_stages_than_units() -> None:
    items = [NodeCost("net.0", 1, 2, 0), NodeCost("code", 1, 2, 0, is_unit=False), NodeCost("net.1", 1, 2, 0)]
    problem = PartitionProblem([0, 1, 2], [1] * 3, {}, [FREE] * 2, nodes=items, cut_bytes=[0] * 4)
    with pytest.raises(PartitionError, match=r"3 stages were asked for, but the step has 2 units, .*: lower "):
        best_partition(problem)


def test_a_first_stage_without_a_unit() -> None:
    items = [NodeCost("code", 1, 2, 0, is_unit=False), NodeCost("net.0", 1, 2, 0), NodeCost("net.1", 1, 2, 0)]
    problem = PartitionProblem([0, 1], [1] * 2, {}, [FREE], nodes=items, cut_bytes=[0] * 4)
    with pytest.raises(PartitionError, match=r"the stage before 'net\.0' would have no unit"):
        given_partition(problem, ["net.0"])


def test_forbidden_cuts_that_leave_too_few_stages() -> None:
    problem = chain(5, [0, 1, 2], cut_bytes=[0, math.inf, math.inf, 1, math.inf, 0])
    with pytest.raises(PartitionError, match="has 5 units, and can be cut in 1 place: lower "):
        best_partition(problem)


# ---- the user's own cuts, by name ----

NAMES = [
    "embed",
    *(f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn", "mlp")),
    "blocks.10",
    "norm",
    "embed",
    "head",
]


def named(num_stages: int, cut_bytes: list[float] | None = None) -> PartitionProblem:
    items = [NodeCost(name, 1, 2, 0) for name in NAMES]
    stages = list(range(num_stages))
    links = [FREE] * (num_stages - 1)
    bytes_at = cut_bytes or [1] * (len(NAMES) + 1)
    return PartitionProblem(stages, [1] * num_stages, {}, links, nodes=items, cut_bytes=bytes_at)


@pytest.mark.parametrize(
    ("split", "cuts"),
    [([], ()), (["head"], (8,)), (["blocks.0.mlp", "norm"], (2, 6)), (["blocks.1", "blocks.10"], (3, 5))],
)
def test_names_and_prefixes(split: list[str], cuts: tuple[int, ...]) -> None:
    assert given_partition(named(len(split) + 1), split).cuts == cuts


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["decoder"], r"'decoder', which the step does not call\. Units, in order: embed, blocks\.0\.attn,"),
        (["embed"], "and not the one that the first stage begins with"),
    ],
)
def test_one_wrong_name(split: list[str], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        given_partition(named(2), split)


@pytest.mark.parametrize("split", [["norm", "blocks.1"], ["norm", "norm"], ["blocks.1", "blocks.1.attn"]])
def test_names_out_of_order(split: list[str]) -> None:
    with pytest.raises(PartitionError, match="different units in execution order"):
        given_partition(named(3), split)


def test_a_cut_where_none_is_possible() -> None:
    forbidden = [1.0] * 10
    forbidden[6] = math.inf
    with pytest.raises(PartitionError, match=r"cannot be cut between 'blocks\.10' and 'norm'"):
        given_partition(named(2, forbidden), ["norm"])
