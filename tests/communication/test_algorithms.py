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
from lightning_smddp.communication.shared_memory import SharedMemory
from tests.communication.errors import message_of
from tests.communication.training import reference_all_reduce
from tests.ranks import RanksFailedError, run_ranks

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


def compare_all(sizes: list[int]) -> list[list[str]]:
    names = [compare_algorithms(sizes)]
    node_mesh.supported = lambda: "refused for a test"
    return [*names, compare_algorithms(sizes)]


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
                # a view into a larger storage, as DDP's buckets may be, named and nameless
                whole = torch.full((numel + 5,), 7, dtype=dtype)
                for named in (slot * 10 + seed, None):
                    tensor = whole[3 : numel + 3].copy_(inputs[dist.get_rank()])
                    reduce_once(algorithm, tensor, named)
                    check(tensor, expected, f"{name} {dtype} {numel}")
                    assert torch.equal(whole[:3], torch.full((3,), 7, dtype=dtype))
                    assert torch.equal(whole[-2:], torch.full((2,), 7, dtype=dtype))
        algorithm.close()
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


# ---- several tensors in flight ----


def overlap_both(names: list[str]) -> None:
    overlap(names)
    node_mesh.supported = lambda: "refused for a test"
    overlap(names)


def overlap(names: list[str]) -> None:
    communicator = communicate()
    algorithms = [communicator.algorithm(name) for name in names]
    numels = [30011, 7, 5000, 1, 12345, 2, 9999, 40000]
    buckets = [torch.empty(numel) for numel in numels]
    for step in range(4):
        futures = []
        for slot, bucket in enumerate(buckets):
            bucket.copy_(everyones(bucket.numel(), torch.float32, 100 * step + slot)[dist.get_rank()])
            algorithm = algorithms[(slot + step) % len(algorithms)]
            futures.append(algorithm.all_reduce(bucket, slot))
        for slot, (future, bucket) in enumerate(zip(futures, buckets, strict=True)):
            assert future.wait() is not None
            expected = reference_all_reduce(everyones(bucket.numel(), torch.float32, 100 * step + slot))
            check(bucket, expected, f"{names} step {step} slot {slot}")
    for algorithm in algorithms:
        algorithm.close()
    communicator.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["hierarchical"], marks=pytest.mark.exhaustive, id="one"),
        pytest.param(["hierarchical", "native", "balanced"], id="three"),
    ],
)
def test_many_buckets_in_flight_at_once_step_after_step(names: list[str]) -> None:
    run_ranks(overlap_both, 4, names, node_ids=list("abab"))


class Recorded:
    """Stands in for one half of the work inside a node; writes down who calls it and in which thread."""

    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        self.name, self.log = name, log

    def reduce_scatter(self, tensor: Tensor, *_: object) -> Tensor:
        return tensor

    def all_gather(self, *_: object) -> None:
        time.sleep(0.02 if self.name == "first" else 0)
        self.log.append((self.name, threading.get_ident()))

    def close(self) -> None:
        pass


def test_algorithms_that_share_meshes_complete_in_one_order() -> None:
    log: list[tuple[str, int]] = []
    thread = ThreadPoolExecutor(1)
    first, second = (
        TwoLevel(name, 2, thread, Recorded(name, log), Recorded(name, log), None)  # type: ignore[arg-type]
        for name in ("first", "second")
    )
    for future in [algorithm.all_reduce(torch.zeros(4), 0) for algorithm in (first, second, first, second)]:
        future.wait()
    assert [name for name, _ in log] == ["first", "second"] * 2
    assert len({ident for _, ident in log}) == 1
    thread.shutdown()


def test_what_is_still_queued_fails_when_its_algorithm_is_closed() -> None:
    thread, gate = ThreadPoolExecutor(1), threading.Event()
    thread.submit(gate.wait)
    memory = Recorded("only", [])
    algorithm = TwoLevel("hierarchical", 2, thread, memory, memory, None)  # type: ignore[arg-type]
    future = algorithm.all_reduce(torch.zeros(4), 0)
    threading.Timer(0.1, gate.set).start()
    algorithm.close()
    assert "closed before the gradients were exchanged" in message_of(RuntimeError, future.wait)
    thread.shutdown()


# ---- halves ----


def average_large_halves() -> list[list[float]]:
    communicator = communicate()
    results = []
    for name in communicator.available():
        tensor = torch.full((1000,), 60000.0, dtype=torch.float16)
        algorithm = communicator.algorithm(name)
        reduce_once(algorithm, tensor, 0)
        results.append(tensor.unique().tolist())
        algorithm.close()
    communicator.close()
    return results


@pytest.mark.parametrize("nodes", ["aa", "aabb"])
def test_fp16_sums_may_overflow_where_the_mean_does_not(nodes: str) -> None:
    for results in run_ranks(average_large_halves, len(nodes), node_ids=list(nodes)):
        assert results == [[60000.0]] * (2 if nodes == "aa" else 3)


# ---- failures ----


def die_in_an_all_reduce(name: str) -> None:
    communicator = communicate()
    algorithm = communicator.algorithm(name)
    tensor = torch.ones(1000)
    reduce_once(algorithm, tensor, 0)
    dist.barrier()
    if dist.get_rank() == 1:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    before = tensor.clone()
    try:
        for _ in range(3):
            reduce_once(algorithm, tensor.copy_(before), 0)
    except Exception as error:
        assert time.monotonic() - start < 2.5
        raise RuntimeError(f"noticed: {type(error).__name__}: {error}") from None


@pytest.mark.parametrize("name", ["native", "shared_memory", "hierarchical", "balanced"])
def test_a_dead_rank_is_an_error_not_a_wrong_mean(name: str) -> None:
    nodes = ["a", "a"] if name == "shared_memory" else ["a", "b"]
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(die_in_an_all_reduce, 2, name, node_ids=nodes)
    assert "SIGKILL" in caught.value.tracebacks[1]
    assert "noticed:" in caught.value.tracebacks[0]


def let_go_of_while_under_way() -> bool:
    """Whether the backend's thread would be the last one to hold the group."""
    communicator, apart = communicate(), dist.new_group()
    native, tensor = Native(communicator.group), torch.ones(3)
    held = weakref.ref(native)
    if dist.get_rank() == 1:
        dist.barrier(apart)  # till then the other rank's is under way
    future = native.all_reduce(tensor, None)
    del native
    is_held = held() is not None
    if dist.get_rank() == 0:
        assert not future.done()
        dist.barrier(apart)
    future.wait()
    communicator.close()
    return is_held


def test_what_follows_a_collective_does_not_hold_its_group() -> None:
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
            for name in ("shared_memory", "tree")
            if name not in communicator.available() and communicator.world_size > 1
        },
    }
    communicator.close()
    return seen


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("a", ["native"]),
        ("aa", ["native", "shared_memory"]),
        ("aabb", ["native", "hierarchical", "balanced"]),
        ("ab", ["native", "hierarchical", "balanced"]),
    ],
)
def test_what_is_available(nodes: str, names: list[str]) -> None:
    for seen in run_ranks(look_around, len(nodes), node_ids=list(nodes)):
        assert (seen["available"], seen["notes"], seen["zero_copy"]) == (names, [], True)
        if "a" not in nodes[1:] and len(nodes) > 1:
            assert seen["refusal"] == "no node has more than one rank"
        if len(nodes) > 1:
            assert seen["error"]["tree"].startswith("algorithm='tree' is unknown. Valid: 'auto', 'native'")
        if "b" in nodes:
            assert "on 2 (a, b). Use algorithm='hierarchical'" in seen["error"]["shared_memory"]


def look_around_with_little_space() -> dict[str, Any]:
    if dist.get_rank() == 1:
        communicator_module.free_bytes = lambda: 64 * 2**20
    return look_around(gradient_bytes=100 * 2**20)


def test_too_small_a_mount_is_noted_with_the_cure_on_every_rank() -> None:
    for seen in run_ranks(look_around_with_little_space, 2):
        assert seen["zero_copy"] is False
        assert seen["available"] == ["native", "shared_memory"]  # through staging
        (note,) = seen["notes"]
        assert "200 MiB needed, 64 free" in note
        assert "--shm-size" in note


def look_around_with_broken_memory(how: str) -> tuple[dict[str, Any], float]:
    original = SharedMemory.all_reduce

    def broken(self: SharedMemory, tensor: Tensor, slot: int) -> None:
        if how == "raises":
            raise OSError("no mapping")
        original(self, tensor, slot)
        tensor[5] += 1

    if dist.get_rank() == 1:
        SharedMemory.all_reduce = broken  # type: ignore[method-assign]
    start = time.monotonic()
    return look_around(), time.monotonic() - start


@pytest.mark.parametrize("how", ["raises", "corrupts"])
def test_memory_that_fails_its_self_test_on_one_rank_is_used_by_none(how: str) -> None:
    for seen, seconds in run_ranks(look_around_with_broken_memory, 3, how):
        assert seen["available"] == ["native"]
        assert "self-test" in seen["refusal"]
        assert seen["notes"] == [f"no shared memory: {seen['refusal']}"]
        cause = {"raises": "self-test failed with no mapping", "corrupts": "self-test on rank 1 differs from gloo's"}
        assert seen["refusal"].startswith(cause[how])
        assert "cannot be used: self-test" in seen["error"]["shared_memory"]
        assert seconds < 5  # a rank that gave up keeps nobody waiting


def close_twice() -> int:
    for _ in range(2):
        communicator = communicate()
        algorithm = communicator.algorithm("hierarchical")
        reduce_once(algorithm, torch.ones(10), 0)
        algorithm.close()
        algorithm.close()
        communicator.close()
        communicator.close()
    return threading.active_count()


def test_closing_ends_threads_and_may_be_repeated() -> None:
    assert max(run_ranks(close_twice, 2, node_ids=["a", "b"])) <= 3  # main, the harness's watcher, torch's own
