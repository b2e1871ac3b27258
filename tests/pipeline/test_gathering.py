"""A divided model gathered for a checkpoint: by the first rank alone, from (simulated) devices in large copies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.checkpoint.contents import Snapshot
from lightning_smddp.wire import stream
from lightning_smddp.wire.stream import gather_tensors
from tests.ranks import run_ranks
from tests.simulated_cuda.synchronisations import counted, table

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.simulated_cuda)]


def shares(rank: int) -> dict[str, Tensor]:
    """Two large tensors, of which one lies crosswise, and small ones, of each rank."""
    return {
        f"{rank}.large": torch.arange(5000.0) + rank,
        f"{rank}.crosswise": torch.arange(600, dtype=torch.int64).view(20, 30).t() + rank,
        f"{rank}.half": torch.full((3,), float(rank), dtype=torch.bfloat16),
        f"{rank}.none": torch.empty(0, 2),
    }


def gather(kind: str) -> tuple[dict[str, Tensor], Counter[str], str]:
    """What this rank gets; how it gets and gives; its waits but for announcements."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    mine = {name: tensor.to(device) for name, tensor in shares(rank).items()}
    stream.CHUNK_BYTES = 4096
    messages: Counter[str] = Counter()
    for name in ("broadcast_tensors", "_send_tensors", "_receive_tensors"):
        setattr(stream, name, _noted(name, getattr(stream, name), messages))
    with counted() as counts:
        found = gather_tensors(mine, group, False, device)
        copies = Counter({key: times for key, times in counts.items() if "objects.py" not in key[1]})
    return found, messages, table(copies)


def _noted(name: str, function: Any, messages: Counter[str]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        messages[name] += 1
        return function(*args, **kwargs)

    return noted


@pytest.mark.parametrize("kind", DEVICES)
def test_the_first_rank_alone_receives(kind: str) -> None:
    expected = {name: tensor for rank in range(3) for name, tensor in shares(rank).items()}
    first, *others = run_ranks(gather, 3, kind, backend="gloo" if kind == "cpu" else "nccl")
    found, messages, waits = first
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert messages == {"_receive_tensors": 2}
    assert "copy" not in waits, waits  # from page-locked memory none is counted, nor waited for one by one
    for nothing, sent, waited in others:
        assert nothing == {}
        assert sent == {"_send_tensors": 1}
        assert "copy" not in waited, waited


def snapshot_on_device() -> tuple[Any, str]:
    weight = torch.arange(9000.0, device="cuda:0").view(90, 100)
    checkpoint = {"state_dict": {"weight": weight, "tied": weight, "rows": weight[3:5]}, "step": 3}
    stream.CHUNK_BYTES = 4096
    with counted() as counts:
        snapshot = Snapshot(checkpoint)
    weight.zero_()
    found: list[bytes] = []

    class File:
        def write(self, data: Any) -> int:
            found.append(bytes(data))
            return len(data)

        def flush(self) -> None:
            pass

    snapshot.dump(File())
    return b"".join(found), table(counts)


@pytest.mark.simulated_cuda
def test_a_snapshot_of_a_device(tmp_path: Any) -> None:
    ((data, waits),) = run_ranks(snapshot_on_device, 1, backend="nccl")
    of_tensors = [line for line in waits.splitlines() if "communication/objects.py" not in line]
    assert "copy" not in "".join(of_tensors), waits
    (tmp_path / "a.ckpt").write_bytes(data)
    state = torch.load(tmp_path / "a.ckpt")["state_dict"]
    assert torch.equal(state["weight"], torch.arange(9000.0).view(90, 100))
    assert torch.equal(state["rows"], state["weight"][3:5])
    assert state["tied"].data_ptr() == state["weight"].data_ptr()
