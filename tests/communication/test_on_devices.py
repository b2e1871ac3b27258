"""What the algorithms do differently with CUDA tensors, on simulated devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.algorithms import Native, TwoLevel
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.intra_node import IntraNodeGroup
from tests.ranks import run_ranks

pytestmark = pytest.mark.simulated_cuda


def on_device(value: float, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.cuda.set_device(dist.get_rank())
    return torch.full((numel,), value, dtype=dtype, device=torch.device("cuda", dist.get_rank()))


class Recorded:
    """All-reduces that are called: operation and elements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, int]] = []
        plain = dist.all_reduce

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((op, tensor.numel()))
            return plain(tensor, op, *args, **kwargs)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)


def means() -> None:
    """Large halves, whose sum is infinite; shards as large as each other, and not."""
    group = dist.group.WORLD
    assert group is not None
    for dtype, value in ((torch.float16, 40000.0), (torch.bfloat16, 3.0), (torch.float32, 3.0)):
        for numel in (1, 8, 9):
            collective, tensor = IntraNodeGroup(group, 2), on_device(value, numel, dtype)
            shard = collective.reduce_scatter(tensor, 0, 0.5)
            assert torch.equal(shard.cpu(), torch.full((len(shard),), value, dtype=dtype))
            collective.all_gather(tensor, 0)
            assert torch.equal(tensor.cpu(), torch.full((numel,), value, dtype=dtype))


def test_the_sum_of_halves_does_not_overflow_where_the_mean_does_not() -> None:
    run_ranks(means, 2, backend="nccl")


def calls_of_one_bucket() -> tuple[Any, list[Any]]:
    """Of ``native``, and of the exchange of a compressed shard."""
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorded, tensor = Recorded(monkeypatch), on_device(1.0 + dist.get_rank(), 5)
        Native(group).all_reduce(tensor, 0).wait()
        assert torch.equal(tensor.cpu(), torch.full((5,), 1.5))
        native = recorded.calls.pop()[0]
        communicator = Communicator(group, tensor.device, timedelta(seconds=20))
        algorithm = communicator.algorithm("hierarchical", Compression("bf16", scope="all"))
        recorded.calls.clear()
        large = on_device(1.0 + dist.get_rank(), 2**20)
        algorithm.all_reduce(large, 0).wait()
        assert torch.equal(large.cpu(), torch.full((2**20,), 1.5))
        sizes = [numel for _, numel in recorded.calls]
        algorithm.close()
        communicator.close()
        return native == dist.ReduceOp.AVG, sizes


def test_a_device_gets_few_passes_and_large_messages() -> None:
    for averages, sizes in run_ranks(calls_of_one_bucket, 2, backend="nccl"):
        assert averages
        assert sizes == [2**20]


def streams_that_wait() -> list[Any]:
    algorithm, waited = TwoLevel(1, ThreadPoolExecutor(1), None, None, None), []
    algorithm.all_reduce(on_device(1.0, 4), 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: waited.append(other))
        algorithm.close()
    return [stream is algorithm._stream for stream in waited]


def test_nothing_is_read_before_the_stream_is_done() -> None:
    assert run_ranks(streams_that_wait, 1, backend="nccl") == [[True]]
