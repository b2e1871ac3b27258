"""What ``deepspeed.comm`` gets from this package's links is what the backend gives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

LIMIT = timedelta(seconds=30)
SIZES = (10_007, 2**17, 100)  # a prime, more than a chunk, and too little to be worth it


def drawn(numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Another tensor on each rank; small whole numbers, whose sums are exact in 16 bits too."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + salt)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


def all_collectives(dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """The three, as DeepSpeed calls them, for each size."""
    from deepspeed import comm

    ranks, rank = dist.get_world_size(), dist.get_rank()
    results: dict[str, list[torch.Tensor]] = {"sum": [], "gather": [], "scatter": [], "mean": [], "max": []}
    for numel in SIZES:
        summed = drawn(numel, dtype)
        comm.all_reduce(summed, group=None)
        results["sum"].append(summed)
        largest = drawn(numel, dtype, salt=1)
        comm.all_reduce(largest, op=comm.ReduceOp.MAX)
        results["max"].append(largest)
        whole = torch.zeros(numel * ranks, dtype=dtype)
        own = whole[rank * numel : (rank + 1) * numel]  # as stages 1 and 2 gather: from a part of the output
        own.copy_(drawn(numel, dtype, salt=2))
        handle = comm.allgather_fn(whole, own, async_op=True)
        handle.wait()
        results["gather"].append(whole)
        part = torch.empty(numel, dtype=dtype)
        comm.reduce_scatter_fn(part, drawn(numel * ranks, dtype, salt=3))
        results["scatter"].append(part)
        mean = torch.empty(numel, dtype=torch.float32)
        comm.reduce_scatter_fn(mean, drawn(numel * ranks, torch.float32, salt=4), op=comm.ReduceOp.AVG)
        results["mean"].append(mean)
    return results


def both(dtype: torch.dtype) -> tuple[str, dict[str, Any], dict[str, Any], list[int]]:
    """By our links and by the backend; and how many elements went through our links, call by call."""
    from deepspeed import comm

    from lightning_smddp.communication.communicator import Communicator
    from lightning_smddp.deepspeed import collectives
    from lightning_smddp.deepspeed.start import use_device

    use_device(torch.device("cpu", 0))
    comm.init_distributed("gloo")
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"), LIMIT)
    backend = collectives.NodeCollectives(communicator, LIMIT)
    carried: list[int] = []
    is_large = backend._is_large

    def noting(tensor: torch.Tensor, group: Any) -> bool:
        if is_large(tensor, group):
            carried.append(tensor.numel())
        return is_large(tensor, group)

    backend._is_large = noting
    expected = all_collectives(dtype)
    with collectives.carried_by(backend):
        actual = all_collectives(dtype)
    communicator.close()
    return backend.describe(), actual, expected, carried


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ranks", "node_ids", "dtype", "way"),
    [
        pytest.param(2, None, torch.float32, "shared memory", marks=pytest.mark.exhaustive),
        pytest.param(3, None, torch.bfloat16, "shared memory", marks=pytest.mark.exhaustive),
        (2, None, torch.bfloat16, "shared memory"),
        (4, "aabb", torch.float32, "shared memory in each node, the backend between ranks of equal local rank"),
        (3, "aab", torch.float32, "gradients are summed by hierarchical, parameters go through the backend"),
    ],
)
def test_the_same_as_the_backend(ranks, node_ids, dtype, way):
    for described, actual, expected, carried in run_ranks(both, ranks, dtype, node_ids=node_ids, timeout=200.0):
        assert described == way
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert set(SIZES[:2]) <= set(carried)
        assert min(carried) > SIZES[2] * ranks
