"""Every algorithm computes the mean, whatever the nodes look like; and the communicator that builds them."""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication import communicator as communicator_module
from lightning_smddp.communication import node_mesh
from lightning_smddp.communication.algorithms import Native, TwoLevel
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.objects import RankTimeoutError
from lightning_smddp.communication.shared_memory import SharedMemory
from tests.communication.errors import message_of
from tests.communication.training import reference_all_reduce
from tests.ranks import run_each, run_ranks

CPU = torch.device("cpu")
SIZES = [1, 7, 4097]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
LAYOUTS = {
    "one rank": "a",
    "one node of 2": "aa",
    "two nodes of 1": "ab",
    "two nodes of 2, interleaved": "abab",
    "3 ranks and 1": "aaab",
    "1 rank, 2 and 1": "abbc",
    "three nodes of 2 and 3, mixed": "abcabcaa",
}
REST = pytest.mark.exhaustive
_EVERYDAY = ("aa", "ab")
_SLOW = ("a", "abab", "abbc")  # the others differ from one of these by numbers alone


def communicate(**options: Any) -> Communicator:
    return Communicator(dist.group.WORLD, CPU, timedelta(seconds=20), **options)


def everyones(numel: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The tensor of each rank: any rank can make them all."""
    generator = torch.Generator().manual_seed(seed)
    drawn = dtype if dtype.is_complex else torch.float32
    return [torch.randn(numel, generator=generator, dtype=drawn).to(dtype) for _ in range(dist.get_world_size())]


def on_all_ranks_alike(tensor: Tensor) -> bool:
    digest = torch.tensor([zlib.crc32(tensor.contiguous().view(torch.uint8).numpy())])
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    return len({int(value) for value in digests}) == 1


def check(tensor: Tensor, expected: Tensor, what: str) -> None:
    tolerance = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}.get(tensor.dtype, 4e-6)
    tolerance = 1e-14 if tensor.dtype in (torch.float64, torch.complex128) else tolerance
    torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")
    assert on_all_ranks_alike(tensor), what


def refused(*_: object) -> bytes:
    raise OSError("refused for a test")


def compare_all(sizes: list[int]) -> list[list[str]]:
    names = [compare_algorithms(sizes)]
    if dist.get_rank() == dist.get_world_size() - 1:  # where one rank cannot, none does
        node_mesh._listen = refused
    names.append(compare_algorithms(sizes))
    assert threading.active_count() <= 3  # main, the harness's watcher, torch's own
    return names


def compare_algorithms(sizes: list[int]) -> list[str]:
    communicator = communicate()
    names = [*communicator.available()]
    if communicator.topology.num_nodes == 1 and communicator.world_size > 1:
        names += ["hierarchical", "balanced"]  # of no use there, but allowed
    for name in names:
        algorithm = communicator.algorithm(name)
        for slot, numel in enumerate(sizes):
            for seed, dtype in enumerate(DTYPES):
                inputs = everyones(numel, dtype, seed)
                expected = reference_all_reduce(inputs)
                # a view into a larger storage, as DDP's buckets may be
                whole = torch.full((numel + 5,), 7, dtype=dtype)
                tensor = whole[3 : numel + 3].copy_(inputs[dist.get_rank()])
                reduce_once(algorithm, tensor, slot * 10 + seed)
                check(tensor, expected, f"{name} {dtype} {numel}")
                assert torch.equal(whole[:3], torch.full((3,), 7, dtype=dtype))
                assert torch.equal(whole[-2:], torch.full((2,), 7, dtype=dtype))
        large = torch.full((1000,), 2.0**15, dtype=torch.float16)  # whose sum is infinite, and parts of it exact
        reduce_once(algorithm, large, 99)
        assert large.unique().tolist() == [2.0**15], name
        algorithm.close()
        algorithm.close()
    communicator.close()
    communicator.close()
    return names


@pytest.mark.parametrize(
    "nodes",
    [
        *(nodes for nodes in LAYOUTS.values() if nodes in _EVERYDAY),
        *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in _SLOW),
        *(pytest.param(nodes, marks=REST) for nodes in LAYOUTS.values() if nodes not in _EVERYDAY + _SLOW),
    ],
)
def test_every_algorithm_computes_the_mean_with_and_without_shared_memory(nodes: str) -> None:
    sizes = SIZES if len(nodes) < 4 else SIZES[::2]
    two_levels = [] if nodes == "a" else ["hierarchical", "balanced"]
    one_node = nodes != "a" and set(nodes) == {"a"}
    names = run_ranks(compare_all, len(nodes), sizes, node_ids=list(nodes))[0]
    assert names == [["native", *["shared_memory"] * one_node, *two_levels], ["native", *two_levels]]


# ---- the order of work, and failures ----


class Idle:
    """Stands in for the work inside a node."""

    def reduce_scatter(self, tensor: Tensor, *_: object) -> Tensor:
        return tensor

    def all_gather(self, *_: object) -> None:
        pass

    close = all_gather


def test_what_is_still_queued_fails_when_its_algorithm_is_closed() -> None:
    thread, gate = ThreadPoolExecutor(1), threading.Event()
    thread.submit(gate.wait)
    memory = Idle()
    algorithm = TwoLevel(2, thread, memory, memory, None)  # type: ignore[arg-type]
    future = algorithm.all_reduce(torch.zeros(4), 0)
    threading.Timer(0.1, gate.set).start()
    algorithm.close()
    assert "closed before the gradients were exchanged" in message_of(RuntimeError, future.wait)
    thread.shutdown()


def let_go_of_while_under_way() -> bool:
    """Whether the backend's thread would be the last one to hold the group."""
    communicator, apart = communicate(), dist.new_group()
    native, tensor = Native(communicator.group), torch.ones(3)
    held = weakref.ref(native)
    if dist.get_rank() == 1:
        dist.barrier(apart)  # till then the other rank's is under way
    future = native.all_reduce(tensor, 0)
    del native
    is_held = held() is not None
    if dist.get_rank() == 0:
        assert not future.done()
        dist.barrier(apart)
    future.wait()
    communicator.close()
    return is_held


def test_what_follows_a_collective_does_not_hold_its_group() -> None:
    """Else gloo's thread may be the one that frees it, and end the process."""
    assert run_ranks(let_go_of_while_under_way, 2) == [False, False]


# ---- the communicator ----


def look_around(**options: Any) -> dict[str, Any]:
    communicator = communicate(**options)
    seen = {
        "available": communicator.available(),
        "refusal": communicator.shared_memory_refusal,
        "notes": communicator.notes,
        "zero_copy": communicator.zero_copy,
        "error": {
            name: message_of(ValueError, lambda name=name: communicator.algorithm(name))
            for name in ("shared_memory",)
            if name not in communicator.available() and communicator.world_size > 1
        },
    }
    communicator.close()
    return seen


def look_around_with_little_space(rank: int) -> dict[str, Any]:
    if dist.get_rank() == rank:
        communicator_module._free_bytes = lambda: 64 * 2**20
    return look_around(gradient_bytes=100 * 2**20)


@pytest.mark.parametrize(
    ("nodes", "names", "full"),
    [
        ("aa", ["native", "shared_memory"], 1),  # through copies
        ("aabb", ["native", "hierarchical", "balanced"], -1),
        ("ab", ["native", "hierarchical", "balanced"], -1),
    ],
)
def test_what_is_available_and_too_small_a_mount_is_noted(nodes: str, names: list[str], full: int) -> None:
    for seen in run_ranks(look_around_with_little_space, len(nodes), full, node_ids=list(nodes)):
        assert (seen["available"], seen["zero_copy"]) == (names, full < 0)
        assert len(seen["notes"]) == (full >= 0)
        assert all("/dev/shm lacks 136 MiB" in note and "--shm-size" in note for note in seen["notes"])
        if nodes == "ab":
            assert seen["refusal"] == "no node has more than one rank"
        if "b" in nodes:
            assert "on 2. Use algorithm='hierarchical'" in seen["error"]["shared_memory"]


def look_around_with_broken_memory(how: str) -> tuple[dict[str, Any], float]:
    original = SharedMemory.all_reduce

    def broken(self: SharedMemory, tensor: Tensor, slot: int) -> None:
        if how == "raises":
            raise OSError("no mapping")
        if how == "gives up":
            raise RankTimeoutError(0, "Rank 0 did not come")
        original(self, tensor, slot)
        tensor[5] += 1

    if dist.get_rank() == 1:
        SharedMemory.all_reduce = broken  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        return look_around(), time.monotonic() - start
    finally:
        SharedMemory.all_reduce = original  # type: ignore[method-assign]


REFUSALS = {
    "raises": "no mapping",
    "corrupts": "the self-test on rank 1 has a wrong sum",
    "gives up": "rank 1 (host",  # is gone
}


def test_memory_that_fails_its_self_test_on_one_rank_is_used_by_none() -> None:
    for of_rank in run_ranks(run_each, 3, look_around_with_broken_memory, [(how,) for how in REFUSALS]):
        for (seen, seconds), refusal in zip(of_rank, REFUSALS.values(), strict=True):
            assert seen["available"] == ["native"]
            assert seen["notes"] == [f"no shared memory: {seen['refusal']}"]
            assert seen["refusal"].startswith(refusal)
            assert f"cannot be used: {seen['refusal']}" in seen["error"]["shared_memory"]
            assert seconds < 5  # a rank that gave up keeps nobody waiting
