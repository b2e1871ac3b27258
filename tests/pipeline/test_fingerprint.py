"""Whether ranks have the same batch."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.pipeline.partition.same_batch import _checksum_on_device, fingerprint, same_everywhere
from tests.ranks import run_in_threads

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
def test_other_values_have_other_fingerprints(other: Any) -> None:
    assert fingerprint(other) != fingerprint(BATCH)


def test_equal_values_have_equal_fingerprints() -> None:
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in BATCH.items()}
    assert fingerprint(copied) == fingerprint(BATCH)
    assert fingerprint(X.t().contiguous().t()) == fingerprint(X)
    assert fingerprint(OrderedDict(BATCH)) == fingerprint(BATCH)


class Own:
    """An object of the user's, with parts of all kinds, and itself among them."""

    __slots__ = ("__dict__", "slot")

    def __init__(self, **values: Any) -> None:
        self.lock, self.me, self.names = threading.Lock(), self, {"b", "a", "c"}
        self.slot = values.pop("slot", 1)
        vars(self).update(values)


def packed(*lengths: int) -> Any:
    return nn.utils.rnn.pack_sequence([X[0, :length] for length in lengths])


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "objects": (lambda: Own(x=X.clone()), lambda: Own(x=X.flip(0))),
    "slots": (lambda: Own(slot=2), lambda: Own(slot=3)),
    "deep": (lambda: [Own(y=Own(z=[X, 1]))], lambda: [Own(y=Own(z=[X, 2]))]),
    "sparse": (lambda: X.to_sparse(), lambda: X.t().contiguous().reshape(4, 6).to_sparse()),
    "compressed": (lambda: X.to_sparse_csr(), lambda: (2 * X).to_sparse_csr()),
    "packed": (lambda: packed(3, 2), lambda: packed(3, 1)),
    "objects in an array": (lambda: np.array([None, "a"]), lambda: np.array([None, "b"])),
    "bytes": (lambda: b"bytes", lambda: b"other"),
    "sets": (lambda: {"x", "y", 3}, lambda: {"x", "z", 3}),
    "complex": (lambda: torch.complex(X, X).conj(), lambda: torch.complex(X, X)),
    "quantized": (
        lambda: torch.quantize_per_tensor(X, 0.5, 0, torch.qint8),
        lambda: torch.quantize_per_tensor(-X, 0.5, 0, torch.qint8),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("make", "other"), KINDS.values(), ids=KINDS)
def test_of_any_object(make: Callable[[], Any], other: Callable[[], Any]) -> None:
    assert fingerprint(make()) == fingerprint(make())
    assert fingerprint(make()) != fingerprint(other())
    assert fingerprint([make(), make()]) == fingerprint([made := make(), made])  # shared or not is the same


def test_on_a_device() -> None:
    """The sum that is computed where the bytes are knows their values and their order."""
    flat = torch.arange(200, dtype=torch.uint8)
    sums = [_checksum_on_device(part) for part in (flat, flat.clone(), flat.flip(0), flat[:-1], flat * 2)]
    assert sums[0] == sums[1]
    assert len(set(sums)) == 4


def votes(group: dist.ProcessGroup) -> list[bool]:
    rank = group.rank()
    values: list[Any] = [BATCH, X + (rank == 1), Own(x=rank) if rank == 2 else X, X]
    return [same_everywhere(value, group) for value in values]


def test_all_ranks_find_the_same() -> None:
    assert run_in_threads(votes, 3) == [[True, False, False, True]] * 3
