"""Whether ranks have the same batch."""

from __future__ import annotations

import datetime
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.partition.batch_sync import BatchSync, digest_of
from tests.ranks import run_ranks

X = torch.arange(24.0).reshape(4, 6)
BATCH = {"x": X, "y": [1, "a", None, True, 2.5], "n": np.arange(3), "b": X.to(torch.bfloat16), "e": torch.empty(0, 2)}


def changed(**values: Any) -> dict[str, Any]:
    return {**BATCH, **values}


@pytest.mark.parametrize(
    "other",
    [
        changed(x=X.flip(0)),
        changed(x=X.roll(1, 1)),
        changed(x=X.double()),
        changed(x=X.reshape(6, 4)),
        changed(x=X.clone().requires_grad_()),
        changed(x=X.index_fill(1, torch.tensor([5]), math.nan)),
        changed(y=[1, "a", None, 1, 2.5]),
        changed(y=[1, "b", None, True, 2.5]),
        changed(n=np.arange(3)[::-1]),
        changed(n=np.arange(3, dtype=np.int32)),
        changed(e=torch.empty(0, 3)),
        changed(z=0),
        list(BATCH.values()),
    ],
)
def test_other_batches_have_other_digests(other: Any) -> None:
    assert digest_of(other) != digest_of(BATCH)


def test_equal_batches_have_equal_digests() -> None:
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in BATCH.items()}
    part_of_more = torch.cat([X, X])[:4]
    for sampled in (None, 256):
        assert digest_of(copied, sampled) == digest_of(BATCH, sampled)
        assert digest_of(X.t().contiguous().t(), sampled) == digest_of(X, sampled)
        assert digest_of(part_of_more, sampled) == digest_of(X, sampled)


@pytest.mark.parametrize(
    "other",
    [changed(x=X + 1), changed(x=X.double()), changed(x=X.reshape(6, 4)), changed(y=[1, "b"]), changed(n=np.arange(4))],
)
def test_samples_show_other_values_and_shapes(other: Any) -> None:
    assert digest_of(other, 256) != digest_of(BATCH, 256)


def test_a_sample_is_of_the_whole_tensor() -> None:
    large = torch.zeros(100_000)
    large[-500:] = 1
    assert digest_of(large, 256) != digest_of(torch.zeros(100_000), 256)
    one = torch.zeros(100_000)
    one[1] = 1
    assert digest_of(one) != digest_of(torch.zeros(100_000))


class Own:
    """An object of the user's, with parts of all kinds, and itself among them."""

    __slots__ = ("__dict__", "slot")

    def __init__(self, **values: Any) -> None:
        self.slot = values.pop("slot", 1)
        self.lock, self.me, self.names = threading.Lock(), self, {"b", "a", "c"}
        vars(self).update(values)


def packed(*lengths: int) -> Any:
    return nn.utils.rnn.pack_sequence([X[0, :length] for length in lengths])


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "objects": (lambda: Own(x=X.clone()), lambda: Own(x=X.flip(0))),
    "deep": (lambda: [Own(y=Own(z=[X, 1]))], lambda: [Own(y=Own(z=[X, 2]))]),
    "sparse": (lambda: X.to_sparse(), lambda: X.double().to_sparse()),
    "sets": (lambda: {"x", "y", 3}, lambda: {"x", "z", 3}),
    "objects in an array": (lambda: np.array([None, "a"]), lambda: np.array([None, "b"])),
    "nesting": (lambda: [[1], 2], lambda: [[1, 2]]),
    "packed": (lambda: packed(3, 2), lambda: packed(3, 1)),
    "strings in an array": (lambda: np.array(["c", "a"]), lambda: np.array(["c", "b"])),
    "bytes": (lambda: b"bytes", lambda: b"other"),
    "complex": (lambda: torch.complex(X, X).conj(), lambda: torch.complex(X, X)),
}


@pytest.mark.parametrize(("make", "other"), KINDS.values(), ids=KINDS)
def test_of_any_object(make: Callable[[], Any], other: Callable[[], Any]) -> None:
    for sampled in (None, 256):
        assert digest_of(make(), sampled) == digest_of(make(), sampled)
        assert digest_of(make(), sampled) != digest_of(other(), sampled)


IN_FULL: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "slots": (lambda: Own(slot=2), lambda: Own(slot=3)),
    "sparse": (lambda: X.to_sparse(), lambda: X.t().contiguous().reshape(4, 6).to_sparse()),
    "compressed": (lambda: X.to_sparse_csr(), lambda: (2 * X).to_sparse_csr()),
    "nested": (lambda: torch.nested.nested_tensor([X, X]), lambda: torch.nested.nested_tensor([X, 2 * X])),
    "of an extension": (lambda: datetime.date(2000, 1, 1), lambda: datetime.date(2000, 1, 2)),
    "entries": (lambda: deque([1, 2]), lambda: deque([1, 3])),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(("make", "other"), IN_FULL.values(), ids=IN_FULL)
def test_of_what_is_compared_in_full_alone(make: Callable[[], Any], other: Callable[[], Any]) -> None:
    assert digest_of(make()) == digest_of(make())
    assert digest_of(make()) != digest_of(other())
    assert digest_of(make(), 256) == digest_of(make(), 256)


def batches_of(rank: int, kind: str) -> list[Any]:
    """Five: alike; others on each rank from the first on; or others in the fifth."""
    if kind == "others":
        return [{"x": X + rank + number, "name": f"{kind} {rank}"} for number in range(5)]
    return [{"x": X + number + (rank if kind == "later" and number == 4 else 0)} for number in range(5)]


def synced() -> dict[str, Any]:
    """By kind: the batches that come out, the digests, and how many times ranks have met."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    found: dict[str, Any] = {}
    meetings = []
    for name in ("all_gather_object", "broadcast_object_list"):
        setattr(dist, name, counting(getattr(dist, name), meetings))
    for kind in ("alike", "others", "later"):
        sync = BatchSync(*[Channel(group, torch.device("cpu"))] * 2)
        meetings.clear()
        digests = []
        batches = []
        for batch in batches_of(rank, kind):
            batches.append(sync.same(batch, kind)["x"])
            digests.append(sync.digest)
        found[kind] = batches, digests, len(meetings)
    with pytest.raises(ValueError, match="have different batches, and that of the first cannot be sent") as refused:
        BatchSync(*[Channel(group, torch.device("cpu"))] * 2).same(Own(x=rank), "own")
    return {**found, "refused": str(refused.value)}


def counting(function: Any, calls: list[int]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return call


def test_ranks_meet_for_the_first_batches_and_for_those_that_differ() -> None:
    first, second = run_ranks(synced, 2)
    for kind, meetings in (("alike", 3), ("others", 1 + 5), ("later", 3)):
        (batches, digests, count), (others, other_digests, other_count) = first[kind], second[kind]
        assert count == other_count == meetings
        for batch, other in zip(batches[:4], others[:4], strict=True):
            assert torch.equal(batch, other)
        assert digests[:4] == other_digests[:4]
        assert (digests[4] == other_digests[4]) == (kind != "later")
    assert first["alike"][1][3] != first["alike"][1][4]
    assert "cannot pickle" in first["refused"]
    assert first["refused"] == second["refused"]


def test_generators_can_be_run_through_again() -> None:
    assert run_ranks(generated, 1) == [[[0, 1, 2], [0, 1, 2]]]


def generated() -> Any:
    assert dist.group.WORLD is not None
    sync = BatchSync(*[Channel(dist.group.WORLD, torch.device("cpu"))] * 2)
    batch = sync.same({"rows": (row for row in range(3))}, "training_step")
    return [list(batch["rows"]), list(batch["rows"])]
