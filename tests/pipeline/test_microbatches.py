"""A batch of any structure comes apart into its rows, by the rules or as the user says."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_smddp.bridge.batches import count_for
from lightning_smddp.pipeline.partition.microbatches import (
    MicroBatch,
    Splitter,
    UnclearBatchError,
    UncombinableError,
    merge_outputs,
    signature,
)
from tests.pipeline.models import assert_same
from tests.strategies.test_accumulation import Labels

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


def split(batch: Any, count: int, *loader_sizes: int) -> list[MicroBatch]:
    splitter = Splitter()
    return splitter.split(batch, count, splitter.rows(batch, loader_sizes))


def sizes(parts: list[MicroBatch]) -> list[int]:
    return [part.size for part in parts]


IMAGES = [rows(3, size, size) for size in (4, 5, 6, 7, 8)]
TARGETS = [{"boxes": rows(size, 4), "label": torch.tensor(size)} for size in (2, 5, 1, 0, 3)]
BATCHES = {
    "tensor": rows(5, 2),
    "tuple of alike fields": (rows(5, 2), rows(5, 1), rows(5, 7)),
    "dict": {"ids": torch.arange(10).reshape(5, 2), "labels": torch.arange(5)},
    "HF BatchEncoding": UserDict(ids=rows(5, 2), mask=rows(5, 2) > 3),
    "named tuple": Pair(rows(5, 2), {"deep": [rows(5), rows(5, 3)]}),
    "dataclass": Sample(rows(5, 3), ["a", "b", "c", "d", "e"]),
    "names": {"x": rows(5, 2), "name": ["a", "b", None, "d", "e"], "price": [1.0, 2, 3, 4, 5]},
    "views": [[rows(5, 2), rows(5, 2)], torch.arange(5)],
    "batches of two loaders": [[rows(5, 2), torch.arange(5)], [rows(5, 2), torch.arange(5)]],
    "collated pairs of numbers": {"x": rows(5, 2), "box": [rows(5), rows(5), rows(5), rows(5)]},
    "detection": (tuple(IMAGES), tuple(TARGETS)),
    "samples": [Sample(image, 3) for image in IMAGES],
    "samples of pairs": [(rows(4), label) for label in range(5)],
    "numpy": {"x": np.arange(10.0).reshape(5, 2), "y": rows(5)},
    "objects": {"x": rows(5), "who": [Fraction(1, n + 1) for n in range(5)]},
}


@pytest.mark.parametrize("name", BATCHES)
def test_round_trip(name: str) -> None:
    batch = BATCHES[name]
    parts = split(batch, 2, 5)
    assert sizes(parts) == [3, 2]
    assert sum(part.weight for part in parts) == pytest.approx(1)
    if name != "detection":  # a step returns rows in lists, no tuples
        assert_same(merge_outputs([part.value for part in parts], sizes(parts), sizes(parts)), batch)


def test_what_has_no_rows_is_given_whole() -> None:
    batch = {"x": rows(6, 2), "y": rows(6), "temperature": 0.5, "step": 3, "task": "copy", "none": None}
    batch |= {"weights": rows(10), "scale": torch.tensor(2.0), "size": torch.Size([1] * 6), "flags": {"a": True}}
    for part in split(batch, 3):
        assert part.value["x"].shape == (2, 2)
        for key in batch.keys() - {"x", "y"}:
            assert_same(part.value[key], batch[key])


def test_sizes_and_weights() -> None:
    assert sizes(split(rows(8), 3)) == [3, 3, 2]
    assert sizes(split(rows(2), 3)) == [1, 1]
    assert sizes(split(rows(7), 1)) == [7]
    assert [part.weight for part in split(rows(8), 3)] == [3 / 8, 3 / 8, 2 / 8]
    assert sizes(split(rows(0, 4), 3)) == [1]
    assert split(None, 4) == [MicroBatch(None, 1, 1.0)]
    assert split(17, 4) == [MicroBatch(17, 1, 1.0)]


@pytest.mark.parametrize(
    "batch",
    [
        [rows(2, 5), rows(2, 1)],  # two fields of two rows, or two samples
        {"views": [rows(2, 5), rows(2, 5)], "y": rows(2)},
        [rows(4), rows(4), rows(4), rows(4)],
        ((rows(3, 4, 4), rows(3, 5, 5)), (torch.tensor(1), torch.tensor(0))),  # two images and labels, or two samples
        {"x": rows(3), "mixed": [rows(3), rows(3, 1), rows(7)]},
        {"x": rows(2), "boxes": [None, {"boxes": rows(2, 4), "seen": rows(1)}]},
    ],
)
def test_a_list_that_can_be_read_both_ways_is_not_cut(batch: Any) -> None:
    with pytest.raises(UnclearBatchError, match=r"may have an entry for each row, or be \d fields"):
        split(batch, 2, 2)


@pytest.mark.parametrize(
    ("batch", "readings", "right"),
    [
        ({0: rows(4, 2), 1: rows(6, 2)}, "4 or 6", 6),
        ({"views": [rows(8, 2), rows(8, 2)]}, "2 or 8", 8),
        ([Sample(image, 3) for image in IMAGES], "3 or 5", 5),
        ((tuple(IMAGES), tuple(range(5))), "2 or 5", 5),
    ],
)
def test_of_two_readings_the_loader_or_the_user_says_which(batch: Any, readings: str, right: int) -> None:
    with pytest.raises(UnclearBatchError, match=rf"may have {readings} rows: "):
        split(batch, 2)
    given = Splitter(batch_size_fn=lambda _: right)
    for parts in (split(batch, 2, right), given.split(batch, 2, given.rows(batch))):
        assert sum(sizes(parts)) == right
        assert len(parts) == 2


def test_rows_that_are_given_have_to_be_there() -> None:
    with pytest.raises(ValueError, match=r"nothing in the batch has 7 rows: float32\[5, 2\]"):
        Splitter(batch_size_fn=lambda _: 7).split(rows(5, 2), 2, 7)


@pytest.mark.parametrize(
    ("opaque", "name"),
    [
        (Graphs(), r"test_microbatches\.Graphs"),
        (rows(5, 2).to_sparse(), r"sparse torch\.Tensor"),
        (nn.ParameterList([rows(5)]), "ParameterList"),
        (nn.utils.rnn.pack_sequence([rows(3), rows(2), rows(1), rows(1), rows(1)]), "PackedSequence"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(opaque: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"batch\['graph'\] is a \S*{name}, which cannot be cut"):
        split({"graph": opaque, "y": rows(5)}, 2)
    if not isinstance(opaque, nn.ParameterList):  # which has one entry
        with pytest.raises(ValueError, match=rf"batch is a \S*{name}, which "):
            split(opaque, 1)
    if not isinstance(opaque, Tensor):  # as one entry per row it is no problem
        assert sizes(split({"graph": [opaque] * 5, "y": rows(5)}, 2)) == [3, 2]


def test_signature_tells_structure_and_shapes_only() -> None:
    def batch(count: int = 3, name: str = "a") -> Any:
        return {"x": rows(count, 2), "name": [name] * 2}

    assert signature(batch()) == signature(batch(name="b"))
    assert signature(batch()) != signature(batch(4))
    assert signature(MicroBatch(batch(), 3, 1.0)) == signature(MicroBatch(batch(name="b"), 3, 0.5))
    different = [rows(2), rows(2).int(), rows(2).requires_grad_(), rows(2).numpy(), [rows(2)], (rows(2),), 1, 1.0, None]
    assert len({signature(value) for value in different}) == len(different)
    assert signature(Sample(rows(2), True)) == "Sample(image=float32[2], name=bool)"


def test_objects_are_cut_by_slices() -> None:
    first, second = (part.value for part in split({"y": rows(5), "own": Labels(rows(5)), "range": range(5)}, 2))
    assert first["own"].classes.equal(rows(5)[:3])
    assert second["range"] == range(3, 5)
    assert sizes(split(Labels(rows(5)), 2)) == [3, 2]


X = rows(5, 6)


@pytest.mark.parametrize(
    ("splitter", "text"),
    [
        (Splitter(split_batch=lambda x, n: []), r"split_batch returned list for num_microbatches=2"),
        (Splitter(split_batch=lambda x, n: [(x, 3), (x, 0)]), r"split_batch returned list.*1=int.*one at least"),
        (Splitter(split_batch=lambda x, n: x.chunk(n, 1)), r"1=float32\[5, 3\].* Return a list of pairs"),
        (Splitter(batch_size_fn=lambda x: 2.5), r"nothing in the batch has 2\.5 rows"),
    ],
)
def test_what_the_user_says_wrongly(splitter: Splitter, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        splitter.split(X, 2, splitter.rows(X))


@pytest.mark.parametrize(
    ("batch", "loader_sizes", "time_first", "found"),
    [
        ([X, torch.zeros(5)], (5,), False, 5),
        ([X, torch.zeros(5)], (), False, 5),
        ([X, torch.zeros(5)], (), True, None),
        ([X, torch.zeros(6)], (6,), False, None),  # (time, rows)
        ([X, torch.zeros(5)], (6,), False, 5),  # the last batch of a stream
        ({"x": X, "time_first": torch.zeros(7, 5)}, (5,), False, None),
        ({"x": X, "class_weights": torch.zeros(10)}, (5,), False, 5),
        ({"one": [X, torch.arange(5)], "other": [rows(6), torch.arange(6)]}, (6, 2, 5), False, 6),
        ([torch.zeros(5, 5, 2), torch.zeros(5)], (5,), False, 5),
        ([torch.zeros(5, 5, 2), torch.zeros(5)], (5,), True, None),
        ([{"x": X[:n]} for n in range(1, 6)], (5,), False, 5),
    ],
)
def test_rows_that_shapes_and_loaders_show(
    batch: Any, loader_sizes: tuple[int, ...], time_first: bool, found: int | None
) -> None:
    splitter = Splitter(time_first=time_first)
    if found is None:
        with pytest.raises(UnclearBatchError, match="may be that of time"):
            splitter.rows(batch, loader_sizes)
    else:
        assert splitter.rows(batch, loader_sizes) == found


# ---- what a step returned comes together again ----


def merged(outputs: list[Any], sizes: list[int]) -> Any:
    return merge_outputs(outputs, sizes, sizes)


def test_each_rule() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "acc": 0.5, "count": torch.tensor(4), "hit": torch.tensor(True), "name": "a"},
        {"loss": torch.tensor(3.0), "acc": 1.0, "count": torch.tensor(2), "hit": torch.tensor(True), "name": "b"},
    ]
    assert merged(outputs, [3, 1]) == {"loss": 1.5, "acc": 0.625, "count": 6, "hit": 2, "name": "b"}
    assert merged([{"n": 3, "ready": True}, {"n": 3, "ready": False}], [3, 1]) == {"n": 6, "ready": False}
    assert merged([np.float32(1), np.float32(3)], [3, 1]) == 1.5
    assert merged([1, 0.5], [3, 1]) == 0.875
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


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([{"a": [rows(5), rows(3)]}, {"a": [rows(4), rows(2)]}], r"output\['a'\]\[1\] has shapes \[\[3\], \[2\]\]"),
        ([{"a": rows(5)}, {"b": rows(4)}], r"output has no rule for \['dict', 'dict'\]"),
        ([rows(3, 2), rows(2, 2)], r"shapes \[\[3, 2\], \[2, 2\]\] for micro-batches of \[5, 4\] rows"),
        ([rows(5, 2), rows(4, 3)], r"shapes \[\[5, 2\], \[4, 3\]\]"),
        ([np.array(["a", "b"]), np.array(["long"])], r"no rule for \['ndarray', 'ndarray'\]"),
        ([rows(5), torch.tensor(1.0)], r"shapes \[\[5\], \[\]\]"),
    ],
)
def test_tensors_without_a_rule_are_refused_with_their_place(outputs: list[Any], text: str) -> None:
    with pytest.raises(UncombinableError, match=text):
        merged(outputs, [5, 4])


# ---- how many ``num_microbatches="auto"`` makes ----


@pytest.mark.parametrize(
    ("rows", "ranks", "allowed", "count"),
    [
        (64, 4, range(99), 16),
        (60, 4, range(99), 15),
        (8, 4, range(99), 8),
        (34, 4, range(99), 16),  # 2 is its only divisor up to 16 but 1
        (13, 4, range(99), 13),
        (1, 1, range(99), 1),
        (64, 1, range(99), 4),
        (64, 4, range(3, 99, 3), 15),
        (60, 4, range(4, 99, 4), 12),
        (13, 2, (10, 11), 10),  # more than 4 a rank if it must be
        (3, 4, range(4, 99), 3),  # another schedule then
    ],
)
def test_auto_num_microbatches(rows: int, ranks: int, allowed: Any, count: int) -> None:
    schedule = SimpleNamespace(microbatches_ok=lambda count, *_: count in allowed)
    assert count_for(schedule, ranks, ranks, rows, nn.Linear(1, 1)) == count


def test_auto_num_microbatches_of_many_rows_tries_few() -> None:
    tried = []
    schedule = SimpleNamespace(microbatches_ok=lambda count, *_: tried.append(count) or True)
    assert count_for(schedule, 4, 4, 2**16, nn.Linear(1, 1)) == 16
    assert len(tried) == 16
