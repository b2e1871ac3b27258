"""Tensors between ranks, and structures with tensors: from one rank to all, and from all to one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication import tensors
from lightning_smddp.communication.tensors import broadcast_structure, broadcast_tensors, gather_structures
from tests.pipeline.models import assert_same
from tests.ranks import run_in_threads, run_ranks

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Fields:
    ids: Any
    note: str = "kept"


def everything(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
    return {
        "tensors": [torch.randn(3, 5, generator=generator).abs().mul(3).to(dtype) for dtype in dtypes],
        "strided": torch.arange(12.0).add(seed).reshape(3, 4).t()[::2],
        "column": torch.arange(12.0).add(seed).reshape(3, 4)[:, 1],
        "one of a column": torch.arange(4.0).add(seed).reshape(1, 4)[:, 1],
        "conjugate": torch.tensor([1 + 2j + seed]).conj(),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(3).mul(seed).to_sparse(),
        "nested": Pair(({"list": [1, (2.5, None)], 3: True, None: "ü"}, []), OrderedDict(a=torch.tensor(seed))),
        "numbers": [2**80, -1, float("inf")],
    }


def dense(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "sparse": value["sparse"].to_dense()}


def there_and_back(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    sent = broadcast_structure(everything(rank), group, 1, CPU)
    assert type(sent["nested"]) is Pair
    assert_same(dense(sent), dense(everything(1)))
    fields = broadcast_structure(Fields(torch.ones(2) * rank), group, 0, CPU)
    assert isinstance(fields, Fields)
    assert (fields.ids.tolist(), fields.note) == ([0.0, 0.0], "kept")
    leaves = [torch.ones(size, requires_grad=True) for size in (2, 2000)]
    with_graphs = [leaf * 2 for leaf in leaves]
    sent = broadcast_structure([*leaves, *with_graphs], group, 0, CPU)
    assert [tensor.requires_grad for tensor in sent] == [True, True, rank == 0, rank == 0]
    found = list(gather_structures(everything(rank), group, False, CPU))
    assert len(found) == (2 if rank == 0 else 0)
    for of_rank, value in enumerate(found):
        assert_same(dense(value), dense(everything(of_rank)))
    assert [value["nested"].right["a"].item() for value in gather_structures(everything(rank), group, True, CPU)] == [
        0,
        1,
    ]


def test_structures_with_tensors_come_as_they_were() -> None:
    run_in_threads(there_and_back, 2)


def in_few_messages(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> int:
    sent = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **_: sent.append(tensor.nbytes))
    broadcast_tensors([torch.ones(3) for _ in range(20)] + [torch.ones(100)], group, 0, CPU)
    return sent


def test_small_tensors_travel_together_and_large_ones_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MESSAGE_BYTES", 120)
    assert run_in_threads(in_few_messages, 1, monkeypatch) == [[120, 120, 120, 120, 120, 40]]


def shares(rank: int, device: torch.device) -> dict[str, Tensor]:
    """A tensor that lies crosswise, one larger than a message, and small ones."""
    return {
        f"{rank}.large": torch.arange(5000.0, device=device) + rank,
        f"{rank}.crosswise": torch.arange(600, dtype=torch.int64, device=device).view(20, 30).t() + rank,
        f"{rank}.half": torch.full((3,), float(rank), dtype=torch.bfloat16, device=device),
        f"{rank}.none": torch.empty(0, 2, device=device),
    }


def gather(kind: str) -> list[dict[str, Tensor]]:
    """To the first rank, and to all."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind != "cpu":
        torch.cuda.set_device(device)
    tensors.MESSAGE_BYTES = 4096
    found: list[dict[str, Tensor]] = [{}, {}]
    for to_all in (False, True):
        for share in gather_structures(shares(rank, device), group, to_all, device):
            found[to_all] |= share
    on_device = broadcast_structure({"weight": torch.ones(2, device=device) * rank, "note": rank}, group, 1, device)
    assert on_device["weight"].device == device
    assert (on_device["weight"].tolist(), on_device["note"]) == ([1.0, 1.0], 1)
    return found


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.simulated_cuda)])
def test_shares_of_all_ranks_on_the_host(kind: str) -> None:
    expected = {name: tensor for rank in range(3) for name, tensor in shares(rank, CPU).items()}
    results = run_ranks(gather, 3, kind, backend="gloo" if kind == "cpu" else "nccl")
    assert [of_first for of_first, _ in results[1:]] == [{}, {}]
    for found in (results[0][0], *(of_all for _, of_all in results)):
        assert found.keys() == expected.keys()
        assert all(tensor.is_cpu and torch.equal(tensor, expected[name]) for name, tensor in found.items())
