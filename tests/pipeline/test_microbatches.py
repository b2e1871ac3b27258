"""A batch of any structure comes apart into its rows, and what a step returns for them comes together again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.partition.microbatches import MicroBatch, combine, signature, split

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Sample:
    image: Tensor
    name: Any = None


class Graphs:
    """As torch_geometric's Batch: it has a length and items, and knows itself where its rows are."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Graphs:
        return self


def rows(count: int, *rest: int) -> Tensor:
    return torch.arange(count * int(np.prod(rest, dtype=int)), dtype=torch.float32).reshape(count, *rest)


def sizes(parts: list[MicroBatch]) -> list[int]:
    return [part.size for part in parts]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (Tensor, np.ndarray)):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (dict, UserDict)):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return (
            type(one) is type(other) and len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))  # noqa: B905
        )
    if isinstance(one, Sample):
        return same(one.image, other.image) and same(one.name, other.name)
    return one == other


IMAGES = [rows(3, size, size) for size in (4, 5, 6, 7, 8)]
TARGETS = [{"boxes": rows(size, 4), "label": torch.tensor(size)} for size in (2, 5, 1, 0, 3)]
BATCHES = {
    "tensor": rows(5, 2),
    "list of fields": [rows(5, 2), torch.arange(5)],
    "tuple of alike fields": (rows(5, 2), rows(5, 1), rows(5, 7)),
    "dict": {"ids": torch.arange(10).reshape(5, 2), "labels": torch.arange(5)},
    "ordered": OrderedDict(x=rows(5), y=rows(5, 1)),
    "HF BatchEncoding": UserDict(ids=rows(5, 2), mask=rows(5, 2) > 3),
    "named tuple": Pair(rows(5, 2), {"deep": [rows(5), rows(5, 3)]}),
    "dataclass": Sample(rows(5, 3), ["a", "b", "c", "d", "e"]),
    "names": {"x": rows(5, 2), "name": ["a", "b", None, "d", "e"], "price": [1.0, 2, 3, 4, 5]},
    "views": [[rows(5, 2), rows(5, 2)], torch.arange(5)],
    "batches of two loaders": [[rows(5, 2), torch.arange(5)], [rows(5, 2), torch.arange(5)]],
    "collated pairs of numbers": {"x": rows(5, 2), "box": [rows(5), rows(5), rows(5), rows(5)]},
    "detection": (tuple(IMAGES), tuple(TARGETS)),
    "detection as dict": {"images": IMAGES, "targets": TARGETS},
    "samples": [Sample(image, 3) for image in IMAGES],
    "samples of pairs": [(rows(4), label) for label in range(5)],
    "strings": ["a", "b", "c", "d", "e"],
    "numpy": {"x": np.arange(10.0).reshape(5, 2), "y": rows(5)},
    "objects": {"x": rows(5), "who": [Fraction(1, n + 1) for n in range(5)]},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_round_trip(batch: Any) -> None:
    parts = split(batch, 2)
    assert sizes(parts) == [3, 2]
    assert sum(part.weight for part in parts) == pytest.approx(1)
    assert not same(parts[0].value, batch)
    assert same(combine([part.value for part in parts], sizes(parts)), batch)


def test_what_has_no_rows_is_given_whole() -> None:
    batch = {"x": rows(6, 2), "y": rows(6), "temperature": 0.5, "step": 3, "task": "copy", "none": None}
    batch |= {"weights": rows(10), "scale": torch.tensor(2.0), "size": torch.Size([1] * 6), "flags": {"a": True}}
    for part in split(batch, 3):
        assert part.value["x"].shape == (2, 2)
        assert all(same(part.value[key], batch[key]) for key in batch if key not in "xy")


def test_sizes_and_weights() -> None:
    assert sizes(split(rows(8), 3)) == [3, 3, 2]
    assert sizes(split(rows(2), 3)) == [1, 1]
    assert sizes(split(rows(7), 1)) == [7]
    assert [part.weight for part in split(rows(8), 3)] == [3 / 8, 3 / 8, 2 / 8]
    assert sizes(split(rows(0, 4), 3)) == [1]
    assert split(None, 4) == [MicroBatch(None, 1, 1.0)]
    assert split(17, 4) == [MicroBatch(17, 1, 1.0)]


def test_tensors_are_views() -> None:
    x = rows(5, 2)
    assert all(part.value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in split(x, 2))


def test_a_list_that_can_be_read_both_ways_is_not_cut() -> None:
    # Two tensors of two rows: two fields of two rows, or two samples.
    assert sizes(split([rows(2, 5), rows(2, 1)], 2)) == [2]
    assert sizes(split({"views": [rows(2, 5), rows(2, 5)], "y": rows(2)}, 2)) == [2]
    assert sizes(split((tuple(IMAGES[:3]), tuple(TARGETS[:3])), 3)) == [3]
    # Unlike tensors are fields.
    assert sizes(split([rows(2, 5), torch.arange(2)], 2)) == [1, 1]


def test_variable_sizes_that_happen_to_equal_the_number_of_rows() -> None:
    targets = [{"boxes": rows(size, 4)} for size in (4, 2, 1, 0)]
    parts = split((tuple(IMAGES[:4]), tuple(targets)), 2)
    assert [[len(target["boxes"]) for target in part.value[1]] for part in parts] == [[4, 2], [1, 0]]


def test_the_number_of_rows_can_be_given() -> None:
    with pytest.raises(ValueError, match=r"may have 4 or 6 rows: batch\[0\] has shape \[4, 2\].*batch_size_fn="):
        split({0: rows(4, 2), 1: rows(6, 2)}, 2)
    with pytest.raises(ValueError, match=r"may have \d or \d rows: batch\['views'\] has 2 entries"):
        split({"views": [rows(8, 2), rows(8, 2)]}, 2)
    parts = split({0: rows(4, 2), 1: rows(6, 2)}, 2, batch_size=6)
    assert [part.value[1].shape[0] for part in parts] == [3, 3]
    assert sizes(split(IMAGES, 2, batch_size=5)) == [3, 2]
    assert sizes(split([rows(2, 5), rows(2, 5)], 2, batch_size=2)) == [1, 1]
    with pytest.raises(ValueError, match=r"batch_size=7, but no tensor or list .* batch has shape \[5, 2\]"):
        split(rows(5, 2), 2, batch_size=7)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        split(rows(5), 0)


@pytest.mark.parametrize(
    ("opaque", "name"),
    [
        (Graphs(), r"test_microbatches\.Graphs"),
        (rows(5, 2).to_sparse(), "Tensor"),
        (nn.ParameterList([rows(5)]), "ParameterList"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(opaque: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"batch\['graph'\] is a \S*{name}, which .*split_batch.*num_microbatches=1"):
        split({"graph": opaque, "y": rows(5)}, 2)
    assert sizes(split({"graph": opaque, "y": rows(5)}, 1)) == [5]
    # As one entry per row it is no problem, but five tensors of five rows are not cut.
    assert sizes(split({"graph": [opaque] * 5, "y": rows(5)}, 2)) == ([5] if isinstance(opaque, Tensor) else [3, 2])


def test_signature_tells_structure_and_shapes_only() -> None:
    def batch(count: int = 3, name: str = "a") -> Any:
        return {"x": rows(count, 2), "name": [name] * 2}

    assert signature(batch()) == signature(batch(name="b"))
    assert signature(batch()) != signature(batch(4))
    assert signature(MicroBatch(batch(), 3, 1.0)) == signature(batch())
    different = [rows(2), rows(2).int(), rows(2).requires_grad_(), rows(2).numpy(), [rows(2)], (rows(2),), 1, 1.0, None]
    assert len({signature(value) for value in different}) == len(different)
    assert signature(Sample(rows(2), True)) == "Sample(image=float32[2], name=bool)"


def test_combined_results_of_a_step() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "acc": 0.5, "count": torch.tensor(4), "hit": torch.tensor(True), "n": 3, "lr": 0.1},
        {"loss": torch.tensor(3.0), "acc": 1.0, "count": torch.tensor(2), "hit": torch.tensor(True), "n": 1, "lr": 0.1},
    ]
    combined = combine(outputs, [3, 1])
    assert combined["loss"] == 1.5
    assert combined["acc"] == 0.625
    assert combined["lr"] == pytest.approx(0.1)
    assert (combined["count"], combined["hit"], combined["n"]) == (6, 2, 4)
    assert combined["loss"].dtype == torch.float32
    assert combine([None, None], [3, 1]) is None
    assert combine(["a", "a"], [3, 1]) == "a"
    assert combine([7, 7], [3, 1]) == 7
    assert combine([(torch.tensor(1.0), "x")] * 2, [2, 2]) == (torch.tensor(1.0), "x")
    assert combine([Pair(1.0, None)] * 2, [2, 2]) == Pair(1.0, None)
    half = [torch.tensor(1.0, dtype=torch.bfloat16)] * 2
    assert combine(half, [1, 2]).dtype == torch.bfloat16


def test_combined_rows() -> None:
    assert combine([rows(6, 2), rows(2, 2)], [3, 1]).shape == (8, 2)  # two rows of output for each row
    assert combine([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]
    assert combine([["a", "b"], ["c", "d"]], [2, 2]) == ["a", "b", "c", "d"]
    assert combine([("a", "b"), ("c",)], [2, 1]) == ("a", "b", "c")
    fields = [[rows(2, 3), torch.arange(2)]] * 2
    assert [field.shape for field in combine(fields, [2, 2])] == [(4, 3), (4,)]
    constant = torch.tensor([1.0, 2.0, 5.0])
    assert combine([constant, constant.clone()], [2, 2]).equal(constant)
    assert combine([{}, {}], [2, 2]) == {}
    assert combine([[], []], [2, 2]) == []
    assert combine([np.ones((2, 3)), np.ones((1, 3))], [2, 1]).shape == (3, 3)
    only = object()
    assert combine([only], [2]) is only


def test_gradients_flow_through_the_combined_loss() -> None:
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    combine([{"loss": loss} for loss in losses], [3, 1])["loss"].backward()
    assert [loss.grad for loss in losses] == [0.75, 0.25]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([{"a": [1.0, "x"]}, {"a": [1.0, "y"]}], r"batch\['a'\]\[1\] is \['x', 'y'\] .* no rule"),
        ([{"a": 1}, {"b": 1}], r"batch has members \[\['a'\], \['b'\]\]"),
        ([{"a": 1}, {"a": "1"}], r"batch\['a'\] has types \['int', 'str'\]"),
        ([rows(3, 2), rows(2, 2)], r"shapes \[\[3, 2\], \[2, 2\]\] for micro-batches of \[5, 4\] rows"),
        ([rows(5, 2), rows(4, 3)], r"shapes \[\[5, 2\], \[4, 3\]\]"),
        ([rows(5), torch.tensor(1.0)], r"is \['float32\[5\]', 'float32\[\]'\]"),
        ([True, False], r"batch is \[True, False\]"),
    ],
)
def test_what_has_no_rule_is_refused_with_its_place(outputs: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        combine(outputs, [5, 4])


def test_a_value_that_is_the_same_for_all_rows_is_no_count_of_them() -> None:
    outputs = [{"length": 4, "count": 4, "size": torch.tensor(4)}] * 2
    joins = {("length",): None, ("size",): None}
    assert combine(outputs, [4, 4], joins) == {"length": 4, "count": 8, "size": 4}
    assert combine([{"length": 4}, {"length": 3}], [4, 4], joins) == {"length": 7}


def test_an_output_for_each_microbatch_is_asked_for() -> None:
    with pytest.raises(ValueError, match="2 outputs for 3 micro-batches"):
        combine([1, 2], [1, 1, 1])
