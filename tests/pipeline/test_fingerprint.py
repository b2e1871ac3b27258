"""Whether ranks have the same batch."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_smddp.pipeline.fingerprint import fingerprint, same_everywhere
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
    assert fingerprint(copied) == fingerprint(BATCH) is not None
    assert fingerprint(X.t().contiguous().t()) == fingerprint(X)
    assert fingerprint(OrderedDict(BATCH)) == fingerprint(BATCH)


@pytest.mark.parametrize("leaf", [object(), X.to_sparse(), torch.empty(2, device="meta"), np.array([None]), b"bytes"])
def test_what_cannot_be_told(leaf: Any) -> None:
    assert fingerprint([X, leaf]) is None


def votes(group: dist.ProcessGroup) -> list[bool]:
    rank = group.rank()
    values: list[Any] = [BATCH, X + (rank == 1), object() if rank == 2 else X, X]
    return [same_everywhere(value, group) for value in values]


def test_all_ranks_find_the_same() -> None:
    assert run_in_threads(votes, 3) == [[True, False, False, True]] * 3
