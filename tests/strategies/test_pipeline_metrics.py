"""Metrics whose state is on the last of two ranks."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection, R2Score

from lightning_smddp.bridge.metrics import PipelineMetrics
from tests.ranks import run_in_threads

CPU = torch.device("cpu")


def make() -> nn.ModuleDict:
    both = MetricCollection([MeanSquaredError(), R2Score()])
    return nn.ModuleDict({"mean": MeanMetric(), "cat": CatMetric(), "both": both})


def step(root: Any, metrics: PipelineMetrics, number: int) -> None:
    """The last rank has the values; all ranks know that there are some."""
    if metrics.group.rank() == metrics.group.size() - 1:
        root["mean"].update(float(number))
        root["cat"].update(torch.arange(float(number)))
        root["both"].update(torch.arange(4.0), torch.arange(4.0) * number)
    metrics.note_changes(["mean", "cat", "both"])


def values(root: Any) -> list[Any]:
    both = root["both"].compute()
    return [root["mean"].compute().item(), root["cat"].compute().tolist(), *(value.item() for value in both.values())]


def body(group: dist.ProcessGroup) -> list[Any]:
    root = make()
    metrics = PipelineMetrics(root, group, group.size() - 1, CPU)
    step(root, metrics, 2)
    step(root, metrics, 3)
    seen = [values(root), values(root)]
    step(root, metrics, 4)
    root["cat"].update(torch.zeros(2))  # outside of the step: on all ranks, which have not got the last state
    root["mean"](1.0)
    seen.append(values(root))
    root["mean"].update(7.0)
    for metric in (root["cat"], root["both"]):
        metric.reset()
    step(root, metrics, 1)
    metrics.share()
    metrics.close()
    seen.append(values(root))
    return seen


def test_all_ranks_compute_what_one_process_computes() -> None:
    (alone,) = run_in_threads(body, 1)
    assert alone[0] == alone[1] == [2.5, [0.0, 1.0, 0.0, 1.0, 2.0], *alone[0][2:]]
    for seen in run_in_threads(body, 2):
        assert seen == alone


@pytest.mark.parametrize("src", [0, 1])
def test_nothing_is_sent_for_metrics_that_no_step_changed(src: int) -> None:
    """So that other ranks need not take part."""
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert run_in_threads(body_untouched, 2, src) == [None, None]


def body_untouched(group: dist.ProcessGroup, src: int) -> None:
    root = make()
    with closing(PipelineMetrics(root, group, 1, CPU)):
        if group.rank() == src:
            root["mean"].compute()
