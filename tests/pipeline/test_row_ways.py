"""Objects that can be cut by themselves, what the user says about cutting, and what shapes say about time and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.objects import with_same_memory
from lightning_smddp.pipeline.partition.microbatches import UnclearBatchError, split
from lightning_smddp.pipeline.partition.rows import Splitter, evidence, has_time_first

X = torch.arange(30.0).reshape(5, 6)


class Table:
    """Rows by ``iloc``, as tables have it."""

    def __init__(self, cells: list[str]) -> None:
        self.cells = cells

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def iloc(self) -> Any:
        return Located(self.cells)


class Located:
    def __init__(self, cells: list[str]) -> None:
        self.cells = cells

    def __getitem__(self, rows: Any) -> Table:
        return Table(self.cells[rows])


class Sized:
    """Tensors with a batch size, cut together by slices."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def batch_size(self) -> torch.Size:
        return self.x.shape[:1]

    def __getitem__(self, rows: Any) -> Sized:
        return Sized(self.x[rows])


class Graphs:
    """Its entries make another batch like it, unless something ``extra`` gets lost."""

    def __init__(self, entries: list[Tensor], **extra: Tensor) -> None:
        self.x, self.sizes = torch.cat(entries), [len(entry) for entry in entries]
        vars(self).update(extra)
        self.calls = 0

    def to_data_list(self) -> list[Tensor]:
        self.calls += 1
        return list(self.x.split(self.sizes))

    @classmethod
    def from_data_list(cls, entries: list[Tensor]) -> Graphs:
        return cls(entries)


def test_each_way() -> None:
    lengths = [3, 1, 2, 6, 1]
    batch = {
        "y": X,
        "packed": nn.utils.rnn.pack_sequence([row[:n] for row, n in zip(X, lengths, strict=True)], False),
        "graphs": Graphs([row[:n] for row, n in zip(X, lengths, strict=True)]),
        "sized": Sized(X),
        "table": Table(list("abcde")),
        "range": range(5),
    }
    first, second = (part.value for part in split(batch, 2))
    padded, there = nn.utils.rnn.pad_packed_sequence(second["packed"], batch_first=True)
    assert there.tolist() == [6, 1]
    assert padded[0].equal(X[3])
    assert first["graphs"].sizes == [3, 1, 2]
    assert second["graphs"].x.equal(torch.cat([X[3], X[4, :1]]))
    assert batch["graphs"].calls == 1
    assert second["sized"].x.equal(X[3:])
    assert first["table"].cells == ["a", "b", "c"]
    assert second["range"] == range(3, 5)


def test_rows_that_only_an_object_has() -> None:
    assert [part.size for part in split(Graphs([X[:2], X[2:3], X[3:]]), 2)] == [2, 1]
    sorted_rows = nn.utils.rnn.pack_sequence([X[0], X[1, :4], X[2, :2]])
    assert [part.size for part in split(sorted_rows, 3)] == [1, 1, 1]


def test_what_loses_something_is_not_cut() -> None:
    with pytest.raises(UnclearBatchError, match="has other attributes than the whole: follow"):
        split(Graphs([X, X], follow=X), 2)


def test_a_part_is_cut_where_the_batch_was() -> None:
    """Two rows of five, and a list of two fields of other sizes: the list is no list of rows."""
    batch = {"x": X, "other": [torch.zeros(3, 2), torch.zeros(3, 4)]}
    part = split(batch, 2)[1]
    assert part.size == 2
    for row in part.split(2):
        assert row.weight == 0.5
        assert row.value["x"].shape == (1, 6)
        assert [field.shape[0] for field in row.value["other"]] == [3, 3]
    assert part.with_rows_in([1, 0]).value["x"].equal(X[[4, 3]])


def by_columns(batch: Tensor, count: int) -> list[Any]:
    return [(part, part.shape[1]) for part in batch.tensor_split(count, 1)]


def test_what_the_user_says() -> None:
    parts = Splitter(split_batch=by_columns).cut(X, 4)
    assert [part.size for part in parts] == [2, 2, 1, 1]
    assert [part.weight for part in parts] == [2 / 6, 2 / 6, 1 / 6, 1 / 6]
    assert [part.value.shape[1] for part in parts[0].split(2)] == [1, 1]
    assert [part.size for part in Splitter(split_batch=lambda x, n: x.split(2)).cut(X, 3)] == [2, 2, 1]
    assert Splitter(batch_size_fn=len).cut(X, 2)[0].size == 3


@pytest.mark.parametrize(
    ("splitter", "text"),
    [
        (Splitter(split_batch=lambda x, n: []), "returned no batches for num_microbatches=2"),
        (Splitter(split_batch=lambda x, n: [(x, 3), (x, 0)]), r"batches of \[3, 0\] rows"),
        (Splitter(split_batch=lambda x, n: x.chunk(n, 1)), r"seem to have \[5, 5\] rows, of 5 in all.*Return pairs"),
        (Splitter(batch_size_fn=lambda x: 2.5), r"batch_size_fn returned 2\.5"),
    ],
)
def test_what_the_user_says_wrongly(splitter: Splitter, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        splitter.cut(X, 2)


@pytest.mark.parametrize(
    ("batch", "sizes", "found"),
    [
        ([X, torch.zeros(5)], (5,), "rows"),
        ([X, torch.zeros(5)], (8, 5), "rows"),
        ([X, torch.zeros(5)], (), "doubt"),
        ([X, torch.zeros(5)], (6,), "doubt"),  # (time, rows)
        ({"x": X, "time_first": torch.zeros(7, 5)}, (5,), "doubt"),
        ([torch.zeros(5, 5, 2), torch.zeros(5)], (5,), "square"),
        ([{"x": X[:n]} for n in range(1, 6)], (5,), "rows"),
    ],
)
def test_what_shapes_say(batch: Any, sizes: tuple[int, ...], found: str) -> None:
    assert evidence(batch, 5, sizes) == found


def test_modules_that_take_time_first() -> None:
    assert has_time_first(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)))
    assert not has_time_first(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2, batch_first=True)))


def test_a_copy_that_shares_memory() -> None:
    graphs = Graphs([X, X])
    copied = with_same_memory([graphs, X, "a"])
    copied[0].x.requires_grad_()
    copied[0].sizes.append(7)
    copied[1].requires_grad_()
    assert graphs.x.requires_grad is X.requires_grad is False
    assert graphs.sizes == [5, 5]
    assert copied[0].x.data_ptr() == graphs.x.data_ptr()
