"""The simulated device and its NCCL refuse, wait and end as the real ones."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import simulated_cuda
from tests.ranks import run_ranks
from tests.simulated_cuda.races import SimulatedRaceError
from tests.simulated_cuda.synchronisations import counted

pytestmark = pytest.mark.simulated_cuda


def device() -> torch.device:
    """This rank's."""
    chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(chosen)
    return chosen


# ---- the device ----


def run_out_of_memory() -> None:
    own = device()
    simulated_cuda.limit_memory(10 << 20)
    before, total = torch.cuda.mem_get_info()
    assert (before, total) == (10 << 20, 10 << 20)
    tensor = torch.zeros(1 << 20, device=own)
    assert torch.cuda.mem_get_info()[0] == 6 << 20
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"Tried to allocate 4194304 bytes.*2097152 bytes are free"):
        [tensor + index for index in range(3)]
    assert torch.cuda.mem_get_info()[0] == 6 << 20
    assert torch.cuda.max_memory_allocated() >= 8 << 20
    tensor.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    tensor.untyped_storage().resize_(4 << 20)
    assert tensor.fill_(2).sum().item() == 2 << 20
    assert torch.cuda.memory_allocated() == 4 << 20
    del tensor
    assert torch.cuda.memory_allocated() == 0


def count_waits() -> list[str]:
    own = device()
    large = torch.ones(100_000)
    pinned = large.pin_memory()
    assert pinned.is_pinned()
    assert not large.is_pinned()
    with counted() as none:
        there = pinned.to(own, non_blocking=True)
        torch.ones(10).to(own, non_blocking=True)
        pinned.copy_(there + 1, non_blocking=True)
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert not none
    with counted() as counts:
        large.to(own, non_blocking=True)
        (there > 0).nonzero()
        there.cpu()
        there.sum().item()
        torch.cuda.synchronize()
    assert all("count_waits" in line for _, line in counts)
    return [kind for kind, _ in counts]


def draw_from_its_own_generator() -> None:
    own = device()

    def draw(seed: int | None = 3) -> list[torch.Tensor]:
        if seed is not None:
            torch.manual_seed(seed)
        dropped = nn.functional.dropout(torch.ones(20, device=own))  # has no generator among its arguments
        return [torch.rand(20, device=own), torch.randperm(20, device=own), dropped]

    first, state = draw(), torch.cuda.get_rng_state(own)
    torch.manual_seed(3)
    host = torch.get_rng_state()
    torch.rand(5, device=own)
    assert torch.equal(torch.get_rng_state(), host)
    assert all(torch.equal(one, other) for one, other in zip(draw(), first, strict=True))
    torch.cuda.set_rng_state(state, own)
    with torch.random.fork_rng(devices=[own.index]):
        second = draw(None)
    assert not any(torch.equal(one, other) for one, other in zip(second, first, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(draw(None), second, strict=True))


def device_body() -> list[str]:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device=device()) + torch.ones(3)
    draw_from_its_own_generator()
    kinds = count_waits()
    run_out_of_memory()
    return kinds


def test_device() -> None:
    (kinds,) = run_ranks(device_body, 1, init=False)
    assert kinds == ["copy from the host", "aten::nonzero", "copy to the host", "item", "synchronize"]


# ---- NCCL ----


def refuse_tensors(own: torch.device) -> None:
    with pytest.raises(ValueError, match="CUDA and dense"):
        dist.all_reduce(torch.ones(2))
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device=own).t()[1:])
    with pytest.raises(TypeError, match="int16"):
        dist.all_reduce(torch.ones(2, device=own, dtype=torch.int16))


def host_does_not_wait(own: torch.device) -> None:
    """Rank 1 comes to an all-reduce when rank 0 has gone on, which has the sum when it asks for it."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1, device=own))  # makes the communicator
    if rank == 1:
        store.wait(["rank 0 has gone on"])
    tensor = torch.full((3,), rank + 1.0, device=own)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.get_future().done()
    work.wait()
    twice = tensor * 2
    store.set("rank 0 has gone on", "")
    assert twice.tolist() == [6.0] * 3
    share = torch.empty(2, device=own)
    dist.reduce_scatter_single(share, torch.arange(4.0, device=own) * (1 + rank), op=dist.ReduceOp.AVG)
    assert share.tolist() == [3.0 * rank, 1.5 + 3.0 * rank]


def waits_are_needed(own: torch.device) -> None:
    """What another stream has written is read only after a wait for it; the same with NCCL's streams."""
    tensor, side = torch.zeros(4, device=own), torch.cuda.Stream()
    with torch.cuda.stream(side):
        with pytest.raises(SimulatedRaceError) as caught:
            tensor.add_(1)
        side.wait_stream(torch.cuda.default_stream())
        tensor.add_(1)
        done = side.record_event()
    assert str(caught.value).count("test_device.py") == 2
    with pytest.raises(SimulatedRaceError, match=r"now:    stream 0 reads.*\n.*before: stream 2 writes"):
        tensor[:1] + 1
    torch.cuda.current_stream().wait_event(done)
    total = tensor.clone()
    work = dist.all_reduce(total, async_op=True)
    tensor + 1  # other memory
    with pytest.raises(SimulatedRaceError, match=r"now:    .*aten::add at.*\n    before: .*all_reduce at"):
        total + 1
    work.wait()
    assert (total + 1).tolist() == [3.0] * 4


def nccl_body() -> None:
    own = device()
    assert dist.get_backend() == "nccl"
    refuse_tensors(own)
    host_does_not_wait(own)
    waits_are_needed(own)


def test_nccl() -> None:
    run_ranks(nccl_body, 2, backend="nccl")
