"""Whether ranks have the same batch."""

from __future__ import annotations

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

from lightning_smddp.bridge.step import with_same_memory
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.partition.batch_sync import BatchSync, digest_of
from tests.pipeline.models import count_collectives
from tests.ranks import run_ranks

X = torch.arange(24.0).reshape(4, 6)


class Own:
    """An object of the user's, with parts of all kinds, and itself among them."""

    __slots__ = ("__dict__", "slot")

    def __init__(self, **values: Any) -> None:
        self.slot = values.pop("slot", 1)
        self.lock, self.me, self.names = threading.Lock(), self, {"b", "a", "c"}
        vars(self).update(values)


def batch(**values: Any) -> dict[str, Any]:
    return {"x": X.clone(), "y": [1, "a", None, True, 2.5], "n": np.arange(3), "e": torch.empty(0, 2), **values}


def packed(*lengths: int) -> Any:
    return nn.utils.rnn.pack_sequence([X[0, :length] for length in lengths])


def pairs(*makes: tuple[Callable[[], Any], Callable[[], Any]]) -> Any:
    return pytest.mark.parametrize(("make", "other"), makes)


@pairs(
    (batch, lambda: batch(x=X + 1)),
    (batch, lambda: batch(x=X.reshape(6, 4).double())),
    (batch, lambda: batch(y=[1, "a", None, 1, 2.5])),
    (batch, lambda: batch(n=np.arange(3, dtype=np.int32))),
    (batch, lambda: list(batch().values())),
    (lambda: [Own(y=Own(z=[X, 1]))], lambda: [Own(y=Own(z=[X, 2]))]),
    (lambda: [Own(x=X)], lambda: [Own(x=X + 1)]),
    (lambda: np.array([None, "a"]), lambda: np.array([None, "b"])),
    (X.to_sparse, lambda: X.double().to_sparse()),
    (lambda: [[1], 2], lambda: [[1, 2]]),
    (lambda: packed(3, 2), lambda: packed(3, 1)),
    (lambda: torch.complex(X, X).conj(), lambda: torch.complex(X, X)),
)
def test_other_batches_have_other_digests(make: Callable[[], Any], other: Callable[[], Any]) -> None:
    for sampled in (None, 256):
        assert digest_of(make(), sampled) == digest_of(make(), sampled)
        assert digest_of(make(), sampled) != digest_of(other(), sampled)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pairs(
    (lambda: X.index_fill(1, torch.tensor([5]), 0.0), lambda: X.index_fill(1, torch.tensor([5]), math.nan)),
    (lambda: torch.zeros(100_000), lambda: torch.zeros(100_000).index_fill(0, torch.tensor([1]), 1.0)),
    (lambda: {"x", "y", 3}, lambda: {"x", "z", 3}),
    (X.to_sparse, lambda: X.t().contiguous().reshape(4, 6).to_sparse()),
    (lambda: torch.nested.nested_tensor([X, X]), lambda: torch.nested.nested_tensor([X, 2 * X])),
    (lambda: deque([1, 2]), lambda: deque([1, 3])),
)
def test_of_what_is_compared_in_full(make: Callable[[], Any], other: Callable[[], Any]) -> None:
    assert digest_of(make()) == digest_of(make())
    assert digest_of(make()) != digest_of(other())
    assert digest_of(make(), 256) == digest_of(make(), 256)


def test_a_copy_that_shares_memory() -> None:
    """Objects of any kind are copied without their memory: what a step does to one, the next one does not see."""
    own = Own(x=X.clone(), sizes=[5, 5])
    copied, tensor = with_same_memory(own), with_same_memory(X)
    copied.x.requires_grad_()
    copied.sizes.append(7)
    tensor.requires_grad_()
    assert own.x.requires_grad is X.requires_grad is False
    assert own.sizes == [5, 5]
    assert copied.x.data_ptr() == own.x.data_ptr()


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
    meetings = count_collectives("all_gather_object", "broadcast_object_list")
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
