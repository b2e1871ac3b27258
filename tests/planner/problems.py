"""Partition problems for tests: random ones, and the placements they come in."""

from __future__ import annotations

import math
import random

from lightning_smddp.planner.problem import Link, NodeCost, PartitionProblem

FREE = Link(0.0, math.inf)

PLACEMENTS = {
    "one": lambda ranks: list(range(ranks)),
    "reversed": lambda ranks: list(range(ranks))[::-1],
    "loop": lambda ranks: list(range(ranks)) * 2,
    "three_loops": lambda ranks: list(range(ranks)) * 3,
    "v": lambda ranks: [*range(ranks), *reversed(range(ranks))],
    "uneven": lambda ranks: [*range(ranks), 0],
}


def random_problem(
    seed: int,
    num_nodes: int,
    rank_of_stage: list[int],
    *,
    tied: float = 0.0,
    forbidden: float = 0.0,
    non_units: float = 0.0,
    largest: int = 9,
) -> PartitionProblem:
    """Costs are small whole numbers, so that ties are frequent."""
    draw = random.Random(seed)
    shared = ["embedding", "table"]
    items = []
    for index in range(num_nodes):
        own = [f"item{index}.w"] if draw.random() < 0.8 else []
        own += [name for name in shared if draw.random() < tied]
        seconds = draw.randint(0, largest), draw.randint(0, largest)
        items.append(
            NodeCost(f"item{index}", *seconds, draw.randint(0, 9), tuple(own), is_unit=draw.random() >= non_units)
        )
    sizes = {name: draw.randint(1, 20) for item in items for name in item.parameters}
    cuts = [math.inf if draw.random() < forbidden else draw.randint(0, 9) for _ in range(num_nodes + 1)]
    kinds = draw.choice([[True], [False], [True, False]])
    return PartitionProblem(
        nodes=items,
        parameter_bytes=sizes,
        cut_bytes=cuts,
        rank_of_stage=rank_of_stage,
        in_flight=[draw.randint(1, 3) for _ in rank_of_stage],
        links=[
            Link(draw.choice([0.0, 0.5]), draw.choice([1.0, 4.0, math.inf]), draw.choice(kinds))
            for _ in rank_of_stage[1:]
        ],
    )


def chain(
    num_nodes: int,
    rank_of_stage: list[int],
    *,
    tied: dict[int, str] | None = None,
    sizes: dict[str, int] | None = None,
    cut_bytes: list[float] | None = None,
    link: Link = FREE,
) -> PartitionProblem:
    """Equal units net.0, net.1, ... of 1 + 2 seconds."""
    names = tied or {}
    items = [NodeCost(f"net.{index}", 1, 2, 0, (names[index],) if index in names else ()) for index in range(num_nodes)]
    return PartitionProblem(
        rank_of_stage,
        [1] * len(rank_of_stage),
        sizes or {},
        nodes=items,
        cut_bytes=cut_bytes or [0] * (num_nodes + 1),
        links=[link] * (len(rank_of_stage) - 1),
    )
