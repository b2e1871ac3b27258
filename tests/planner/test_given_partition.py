"""The user's own cuts, by name."""

from __future__ import annotations

import math

import pytest

from lightning_smddp.planner.partition import given_partition
from lightning_smddp.planner.problem import NodeCost, PartitionError, PartitionProblem

NAMES = [
    "embed",
    *(f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn", "mlp")),
    "blocks.10",
    "norm",
    "embed",
    "head",
]


def problem(num_stages: int, cut_bytes: list[float] | None = None) -> PartitionProblem:
    items = [NodeCost(name, 1, 2, 0) for name in NAMES]
    stages = list(range(num_stages))
    return PartitionProblem(items, {}, cut_bytes or [1] * (len(NAMES) + 1), stages, [1] * num_stages)


@pytest.mark.parametrize(
    ("split", "cuts"),
    [([], ()), (["head"], (8,)), (["blocks.0.mlp", "norm"], (2, 6)), (["blocks.1", "blocks.10"], (3, 5))],
)
def test_names_and_prefixes(split: list[str], cuts: tuple[int, ...]) -> None:
    assert given_partition(problem(len(split) + 1), split).cuts == cuts


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["norm", "head"], "makes 3 stages, but 2 were asked for"),
        (["blocks.1.atn"], r"'blocks\.1\.atn'.* did you mean 'blocks\.1\.attn' or .*Units, in order: embed, .*, head$"),
        (["decoder"], r"'decoder', which the step does not call\. Units, in order: embed, blocks\.0\.attn,"),
        (["embed"], "'embed' is where the first stage begins"),
    ],
)
def test_one_wrong_name(split: list[str], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        given_partition(problem(2), split)


@pytest.mark.parametrize("split", [["norm", "blocks.1"], ["norm", "norm"], ["blocks.1", "blocks.1.attn"]])
def test_names_out_of_order(split: list[str]) -> None:
    with pytest.raises(PartitionError, match="different units in execution order"):
        given_partition(problem(3), split)


def test_a_cut_where_none_is_possible() -> None:
    forbidden = [1.0] * 10
    forbidden[6] = math.inf
    with pytest.raises(PartitionError, match=r"cannot be cut between 'blocks\.10' and 'norm'"):
        given_partition(problem(2, forbidden), ["norm"])
