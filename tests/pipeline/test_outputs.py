"""What a step returned for micro-batches comes together again, or is refused with its place."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_smddp.pipeline.partition.microbatches import UncombinableError, merge_outputs

Pair = namedtuple("Pair", ["first", "second"])


def rows(count: int, *rest: int) -> Tensor:
    return torch.arange(count * int(np.prod(rest, dtype=int)), dtype=torch.float32).reshape(count, *rest)


def merged(outputs: list[Any], sizes: list[int]) -> Any:
    return merge_outputs(outputs, sizes, sizes)


def test_each_rule() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "acc": 0.5, "count": torch.tensor(4), "hit": torch.tensor(True), "name": "a"},
        {"loss": torch.tensor(3.0), "acc": 1.0, "count": torch.tensor(2), "hit": torch.tensor(True), "name": "b"},
    ]
    assert merged(outputs, [3, 1]) == {"loss": 1.5, "acc": 0.625, "count": 6, "hit": 2, "name": "b"}
    assert merged([{"n": 3, "ready": True}, {"n": 3, "ready": False}], [3, 1]) == {"n": 6, "ready": False}
    assert merged([None, None], [3, 1]) is None
    assert merged([Pair(torch.tensor(1.0), "x")] * 2, [2, 2]) == Pair(torch.tensor(1.0), "x")
    half = [torch.tensor(1.0, dtype=torch.bfloat16)] * 2
    assert merged(half, [1, 2]).dtype == torch.bfloat16
    only = object()
    assert merged([only], [2]) is only


def test_means_are_by_weight_and_what_weighs_nothing_does_not_count() -> None:
    losses = [torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(4.0)]
    assert merge_outputs(losses, [2, 2, 2], [10, 0, 30]) == 3.25


def test_rows_are_concatenated() -> None:
    assert merged([rows(6, 2), rows(2, 2)], [3, 1]).shape == (8, 2)  # two rows of output for each row
    assert merged([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]
    fields = [Pair(rows(2, 3), torch.arange(2))] * 2
    assert [field.shape for field in merged(fields, [2, 2])] == [(4, 3), (4,)]
    constant = torch.tensor([1.0, 2.0, 5.0])
    assert merged([constant, constant.clone()], [2, 2]).equal(constant)
    assert merged([np.ones((2, 3)), np.ones((1, 3))], [2, 1]).shape == (3, 3)


def test_gradients_flow_through_the_loss() -> None:
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    merged([{"loss": loss} for loss in losses], [3, 1])["loss"].backward()
    assert [loss.grad for loss in losses] == [0.75, 0.25]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([{"a": [rows(5), rows(3)]}, {"a": [rows(4), rows(2)]}], r"output\['a'\]\[1\] has shapes \[\[3\], \[2\]\]"),
        ([{"a": rows(5)}, {"b": rows(4)}], r"output differs in its structure .* \['dict', 'dict'\]"),
        ([rows(3, 2), rows(2, 2)], r"shapes \[\[3, 2\], \[2, 2\]\] for micro-batches of \[5, 4\] rows"),
        ([rows(5, 2), rows(4, 3)], r"shapes \[\[5, 2\], \[4, 3\]\]"),
        ([rows(5), torch.tensor(1.0)], r"shapes \[\[5\], \[\]\]"),
    ],
)
def test_tensors_without_a_rule_are_refused_with_their_place(outputs: list[Any], text: str) -> None:
    with pytest.raises(UncombinableError, match=text):
        merged(outputs, [5, 4])
