"""What is computed on a device stays there: how often each part of a step makes the host wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.bridge.loss_weights import LossWeight
from lightning_smddp.bridge.step_record import reduce_logged
from lightning_smddp.communication.nonfinite import bad_gradients
from lightning_smddp.communication.norms import norm_over_ranks
from lightning_smddp.pipeline.mesh import Channel, Ownership
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.step_exchange import StepExchange
from lightning_smddp.pipeline.state.gradients import (
    TiedGradients,
    clip_by_norm,
    create_tied_groups,
    share_overflow,
)
from tests.ranks import run_ranks
from tests.simulated_cuda.synchronisations import counted, table

pytestmark = pytest.mark.simulated_cuda

ALLOWED = {
    "weights by labels": 1,
    "weights by a mask": 1,
    "a logged mean": 0,
    "tied gradients": 0,
    "tied gradients, of which one is missing": 1,
    "overflow": 0,
    "clipping": 0,
    "the largest of all gradients": 0,
    "a look at gradients": 1,
    "a message like the last one": 1,
}


def parts(device: torch.device) -> dict[str, Callable[[], Any]]:
    """By name; collective over two ranks."""
    group = dist.group.WORLD
    assert group is not None
    labels = [MicroBatch(torch.tensor([[1, 2, -100], [0, -100, 2]], device=device), 2, 0.25) for _ in range(4)]
    module = nn.Linear(3, 2, device=device)
    ownership = Ownership({"weight": (0, 1), "bias": (0, 1)}, {}, 2)
    groups = create_tied_groups(ownership, (0, 1), timedelta(seconds=20), device)
    tied = TiedGradients(module, ownership, group.rank(), groups)
    module(torch.ones(1, 3, device=device)).sum().backward()
    parameters = dict(module.named_parameters())
    placeholder = nn.Parameter(torch.zeros(1, 1, device=device))

    def with_one_missing() -> None:
        if group.rank() == 1:
            module.bias.grad = None
        tied.sum()

    gradients = [parameter.grad for parameter in parameters.values()]

    hosts = Channel(dist.new_group(backend="gloo"), torch.device("cpu"))
    exchange = StepExchange(Channel(group, device), hosts, 0)
    message = {"loss": placeholder.detach(), "rows": 2.5, "step": 3}

    def send() -> Any:
        return exchange.run(message)

    send()
    values = [torch.tensor(float(number), device=device) for number in range(4)]
    return {
        "weights by labels": lambda: LossWeight("labels").apply(labels),
        "weights by a mask": lambda: LossWeight("entry").apply(labels),
        "a logged mean": lambda: reduce_logged("mean", values, [0.25] * 4),
        "tied gradients": tied.sum,
        "overflow": lambda: share_overflow(parameters.values(), placeholder, group),
        "clipping": lambda: clip_by_norm(parameters, ownership, group, 1.0, device),
        "the largest of all gradients": lambda: norm_over_ranks(gradients, group, float("inf"), device),
        "a message like the last one": send,
        "a look at gradients": lambda: bad_gradients(parameters.items()),
        "tied gradients, of which one is missing": with_one_missing,
    }


def count_each() -> dict[str, Counter[tuple[str, str]]]:
    found = {}
    for name, part in parts(torch.device("cuda", dist.get_rank())).items():
        with counted() as counts:
            part()
        found[name] = counts
    return found


def test_the_host_rarely_waits() -> None:
    for counts in run_ranks(count_each, 2, backend="nccl"):
        assert set(counts) == set(ALLOWED)
        for name, found in counts.items():
            assert found.total() <= ALLOWED[name], f"{name}:\n{table(found)}"
