"""What the report says of communication on (simulated) devices, where the host only launches it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.report import CommunicationReport
from tests.communication.training import hooked
from tests.ranks import run_ranks
from tests.simulated_cuda import nccl
from tests.simulated_cuda.synchronisations import counted, in_package, table

pytestmark = pytest.mark.simulated_cuda

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


class Slow(torch.autograd.Function):
    """Its backward takes ``BACKWARD_S``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradients[0]


class Two(nn.Module):
    """Two layers; the second one's gradients come long before the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(Slow.apply(self.first(rows)))


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
