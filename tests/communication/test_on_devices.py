"""What the algorithms, and the report, do differently with CUDA tensors, on simulated devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.algorithms import IntraNodeGroup, Native, TwoLevel
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.report import CommunicationReport
from tests.communication.training import hooked
from tests.ranks import run_ranks
from tests.simulated_cuda import nccl
from tests.simulated_cuda.synchronisations import counted, in_package, table

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


def streams_that_wait() -> list[Any]:
    algorithm, waited = TwoLevel(1, ThreadPoolExecutor(1), None, None, None), []
    algorithm.all_reduce(on_device(1.0, 4), 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: waited.append(other))
        algorithm.close()
    return [stream is algorithm._stream for stream in waited]


def on_streams() -> tuple[Any, ...]:
    means()
    return *calls_of_one_bucket(), streams_that_wait()


def test_the_mean_of_halves_few_passes_and_large_messages_and_nothing_read_before_the_stream_is_done() -> None:
    for averages, sizes, waited in run_ranks(on_streams, 2, backend="nccl"):
        assert averages
        assert sizes == [2**20]
        assert waited == [True]


# ---- what the report says, where the host only launches ----

WIRE_S, BACKWARD_S, STEPS = 0.06, 0.2, 3


@contextmanager
def slow_all_reduce() -> Iterator[None]:
    """Each all-reduce takes ``WIRE_S`` on its stream."""
    do = nccl.Communicators._do

    def slow(self: Any, call: Any, peer: int | None = None) -> Any:
        if call.name == "all_reduce":
            begin = call.begin
            call.begin = lambda: (time.sleep(WIRE_S), begin())[1]
        return do(self, call, peer)

    nccl.Communicators._do = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        nccl.Communicators._do = do  # type: ignore[method-assign]


class Two(nn.Module):
    """Two layers; the second one's gradients come long before the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        hidden.register_hook(lambda gradient: time.sleep(BACKWARD_S))
        return self.second(hidden)


def train() -> CommunicationReport:
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    with hooked("native", device=device) as wrapper:
        model = wrapper.wrap(Two().to(device), device_ids=[device.index], bucket_cap_mb=0.3)
        for step in range(STEPS + 1):
            if step == 1:  # DDP has rebuilt its buckets, and the rest is warm
                torch.cuda.synchronize()
                wrapper.recorder.__init__(device)  # type: ignore[misc]
            with slow_all_reduce(), counted() as counts:
                model(torch.ones(2, 300, device=device)).sum().backward()
            ours = in_package(counts)
            assert ours.total() == 0, table(ours)
            wrapper.recorder.read()
            torch.cuda.synchronize()
        return wrapper.synchronizers[0].report()


@pytest.mark.slow
def test_the_report_has_times_of_the_device() -> None:
    for report in run_ranks(train, 2, backend="nccl"):
        assert report.steps == STEPS
        for exposed, hidden in zip(report.exposed_s, report.hidden_s, strict=True):
            assert exposed >= 0.95 * WIRE_S * STEPS  # the last bucket's
            assert hidden >= 0.95 * WIRE_S * STEPS  # that of the one before
            assert exposed + hidden < (WIRE_S + BACKWARD_S) * STEPS
