"""Reduction through shared memory: without a copy, with one, and in mixtures of the two."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication import shared_memory
from lightning_smddp.communication.node_mesh import NodeMesh
from lightning_smddp.communication.shared_memory import SharedMemory
from lightning_smddp.communication.topology import Topology
from tests.communication.errors import message_of
from tests.communication.training import reference_all_reduce
from tests.leaks import Snapshot
from tests.ranks import run_each, run_in_threads, run_ranks

PATIENCE = timedelta(seconds=20)


def open_mesh(group: dist.ProcessGroup) -> NodeMesh:
    topology = Topology.from_identities(["host"] * group.size(), group.rank())
    return NodeMesh.connect(topology, group, PATIENCE)


@contextmanager
def memory_of(group: dist.ProcessGroup, **options: Any) -> Iterator[SharedMemory]:
    mesh = open_mesh(group)
    memory = SharedMemory(mesh, **options)
    try:
        yield memory
    finally:
        memory.close()
        mesh.close()


def tensors(numel: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]


def is_shared(address: int) -> bool:
    """Whether a shared mapping of this process lies there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(text, 16) for text in line.split()[0].split("-"))
        if low <= address < high:
            return line.split()[1].endswith("s")
    return False


# ---- sums ----


def reduce_all(group: dist.ProcessGroup, numel: int, copied: set[int], dtype: torch.dtype) -> list[Tensor]:
    """The means of some steps, each also watched, which changes no bit."""
    results = []
    with memory_of(group, zero_copy=group.rank() not in copied) as memory:
        kept, watched = (torch.empty(numel, dtype=dtype) for _ in range(2))
        for step in range(3):
            for slot, tensor in enumerate((kept, watched)):
                tensor.copy_(tensors(numel, group.size(), dtype, step)[group.rank()])
                finite = memory.all_reduce(tensor, slot, 1 / group.size(), watch=tensor is watched)
                assert finite
            assert torch.equal(kept, watched)
            results.append(kept.clone())
    return results


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
NONE: set[int] = set()


@pytest.mark.parametrize(
    ("size", "numel", "copied", "dtype"),
    [
        *((size, numel, NONE, torch.float32) for size in (1, 2, 3) for numel in (0, 1, 7, 200003)),
        *((3, 10007, copied, torch.float32) for copied in ({0}, {1}, {0, 1, 2})),
        *((size, 3001, copied, dtype) for size, copied in ((2, NONE), (3, {0})) for dtype in DTYPES),
    ],
    ids=str,
)
def test_means(size: int, numel: int, copied: set[int], dtype: torch.dtype) -> None:
    results = run_in_threads(reduce_all, size, numel, copied, dtype)
    for step, of_ranks in enumerate(zip(*results, strict=True)):
        expected = reference_all_reduce(tensors(numel, size, dtype, step))
        torch.testing.assert_close(of_ranks[0], expected)
        assert all(torch.equal(of_ranks[0], other) for other in of_ranks[1:])


def reduce_in_two_steps(group: dist.ProcessGroup, numel: int, num_shards: int, copied: set[int]) -> list[Tensor]:
    results = []
    tensor = torch.empty(numel)
    with memory_of(group, zero_copy=group.rank() not in copied, num_shards=num_shards) as memory:
        low, high = (numel * min(i, num_shards) // num_shards for i in (group.rank(), group.rank() + 1))
        for step in range(3):
            tensor.copy_(tensors(numel, group.size(), seed=step)[group.rank()])
            shard = memory.reduce_scatter(tensor, 0, 0.5)
            assert shard.numel() == high - low
            shard.add_(1)  # what the exchange between nodes would do
            memory.all_gather(tensor, 0)
            results.append(tensor.clone())
            dist.all_reduce(torch.zeros(1), group=group)
    return results


@pytest.mark.parametrize("copied", [set(), {1}, {0, 2}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("numel", [2, 10007])
def test_scatter_and_gather(numel: int, num_shards: int, copied: set[int]) -> None:
    results = run_in_threads(reduce_in_two_steps, 3, numel, num_shards, copied)
    for step, of_ranks in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(of_ranks[0], sum(tensors(numel, 3, seed=step)) * 0.5 + 1)
        assert all(torch.equal(of_ranks[0], other) for other in of_ranks)


# ---- without a copy ----


def share_views(group: dist.ProcessGroup) -> tuple[bool, bool, list[float], list[float]]:
    whole = torch.arange(40000.0) + group.rank()
    bucket, beside, gradient = whole[1000:31000], whole[:1000], whole[1000:1003]
    with memory_of(group) as memory:
        before = is_shared(bucket.data_ptr())
        memory.all_reduce(bucket, 3)
        after = is_shared(bucket.data_ptr()) and is_shared(whole.data_ptr())
        assert gradient.data_ptr() == bucket.data_ptr()  # other views moved along
        return before, after, gradient.tolist(), beside[:3].tolist()


def test_the_bucket_itself_moves_into_shared_memory_with_all_its_views() -> None:
    for rank, result in enumerate(run_in_threads(share_views, 2)):
        assert result == (False, True, [2001.0, 2003.0, 2005.0], [0.0 + rank, 1.0 + rank, 2.0 + rank])


def memory_files() -> set[str]:
    """Device and number of the files that this process has mapped and nobody can open."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {" ".join(line.split()[3:5]) for line in lines if line.endswith("(deleted)")}


def move_bucket(group: dist.ProcessGroup) -> float:
    with memory_of(group) as memory:
        tensor = torch.ones(5000)
        memory.all_reduce(tensor, 0)
        tensor = torch.full((7000,), 2.0)
        memory.all_reduce(tensor, 0)
        return tensor.mean().item()


def test_no_rank_keeps_a_slots_last_memory_beside_the_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP makes its buckets anew in the second step: for a moment they were there three times."""
    share, met, still = shared_memory.share_storage, threading.Barrier(2), []

    def look(tensor: Tensor) -> int:
        met.wait(20)  # both have let go of what they had
        still.append(memory_files())
        met.wait(20)
        return share(tensor)

    monkeypatch.setattr(shared_memory, "share_storage", look)
    before = memory_files()
    assert run_in_threads(move_bucket, 2) == [4.0, 4.0]
    assert still == [before] * 4


# ---- when sharing fails ----


def full_mount(tensor: Tensor) -> int:
    raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")


def reduce_with_full_mount_on_rank_one(after: int) -> tuple[list[float], list[str]]:
    calls = iter(range(100))
    share = shared_memory.share_storage
    if dist.get_rank() == 1:
        shared_memory.share_storage = lambda tensor: share(tensor) if next(calls) < after else full_mount(tensor)
    buckets = [torch.empty(5000) for _ in range(3)]
    sums = []
    with memory_of(dist.group.WORLD) as memory, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for slot, bucket in enumerate(buckets):
                bucket.fill_(10.0**step)
                memory.all_reduce(bucket, slot)
                sums.append(bucket.unique().item())
    shared_memory.share_storage = share
    return sums, [str(warning.message) for warning in caught]


def test_a_full_mount_on_one_rank_costs_a_copy_and_one_warning() -> None:
    results = run_ranks(run_each, 2, reduce_with_full_mount_on_rank_one, [(0,), (2,)])
    for (first_sums, first_warnings), (sums, (warning,)) in zip(*results, strict=True):
        assert first_sums == sums == [2.0] * 3 + [20.0] * 3 + [200.0] * 3
        assert first_warnings == []
        assert "No space left on device" in warning
        assert "--shm-size" in warning


# ---- different tensors ----


def reduce_different(group: dist.ProcessGroup, make: Callable[[int], tuple[Tensor, int]]) -> str:
    with memory_of(group) as memory:
        tensor, slot = make(group.rank())
        return message_of(ValueError, lambda: memory.all_reduce(tensor, slot))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda rank: (torch.zeros(10 + rank // 2), 4),
            ("10 x torch.float32", "11 x torch.float32"),
        ),
        (
            lambda rank: (torch.zeros(10, dtype=torch.float64 if rank == 2 else torch.float32), 4),
            ("10 x torch.float32", "10 x torch.float64"),
        ),
        (lambda rank: (torch.zeros(10), 4 + rank // 2), ("bucket 4 of", "bucket 5 of")),
    ],
    ids=["size", "dtype", "slot"],
)
def test_different_tensors_are_an_error_on_every_rank(make: Callable[[int], Any], said: tuple[str, str]) -> None:
    for rank, message in enumerate(run_in_threads(reduce_different, 3, make)):
        assert f"{rank} (host host, local rank {rank})" in message
        assert "rank 2 (host host, local rank 2)" in message
        if rank == 0:
            assert all(part in message for part in said)


# ---- waiting, and what is left ----


def copy_smaller_buckets(group: dist.ProcessGroup) -> tuple[bool, int]:
    """DDP's first step has one bucket of the whole model, the later ones smaller ones."""
    with memory_of(group, zero_copy=False) as memory:
        for numel in (10_000, 100, 100):
            bucket = torch.full((numel,), float(group.rank()))
            memory.all_reduce(bucket, 0, 0.5)
        held = [copy for copy, _ in memory._own.values()]
        return bool((bucket == 0.5).all()), sum(copy.nbytes for copy in [*held, *memory._peers.values()])


def test_copies_are_not_larger_than_the_buckets() -> None:
    for is_mean, copied in run_in_threads(copy_smaller_buckets, 2):
        assert is_mean
        assert copied <= 2 * mmap.PAGESIZE


def count_descriptors() -> list[int]:
    counts = []

    def count() -> None:
        counts.append(len(os.listdir("/proc/self/fd")))

    mesh = open_mesh(dist.group.WORLD)
    count()
    memory, copying = SharedMemory(mesh), SharedMemory(mesh, zero_copy=False)
    buckets = [torch.ones(3000) for _ in range(3)]
    for step in range(200):
        for slot, bucket in enumerate(buckets):
            memory.all_reduce(bucket, slot, 0.5)
        memory.all_reduce(torch.ones(3000), 3, 0.5)  # a new tensor in every step
        copying.all_reduce(torch.ones(3000), 0, 0.5)
        if step in (4, 199):
            count()
    memory.close()
    copying.close()
    del buckets, bucket
    count()
    mesh.close()
    return counts


def test_descriptors_do_not_grow_and_all_are_closed_in_the_end() -> None:
    before = Snapshot.take()
    for opened, early, late, closed in run_ranks(count_descriptors, 2):
        assert early == late
        assert closed == opened
    assert before.new_shared_memory() == set()
