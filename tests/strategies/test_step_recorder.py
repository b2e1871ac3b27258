"""What is kept of a step's micro-batches and put together, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, R2Score

from lightning_smddp.bridge.absent import AbsentValueError
from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.step_record import StepRecorder
from tests.ranks import run_in_threads


class Module(LightningModule):
    """``step`` is the user's code; what reaches Lightning's ``log`` is kept."""

    def __init__(self, step: Callable[..., Any], **metrics: nn.Module) -> None:
        super().__init__()
        self.step, self.logged = step, []
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        shown = value._forward_cache if isinstance(value, nn.Module) else torch.as_tensor(value)
        self.logged.append((name, shown.tolist(), kwargs))

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value, _ in self.logged]


def test_groups_of_the_users_own_are_refused() -> None:
    module = Module(lambda self, rows: self.log("x", 1.0, sync_dist_group=object()))
    recorder = StepRecorder(module)
    with pytest.raises(ValueError, match="Leave `sync_dist_group` out"), recorder.microbatch(0, 0, 1, None, keep=True):
        module.step(module, torch.zeros(1))


def test_what_metrics_return_where_the_step_does_not_end_cannot_be_read() -> None:
    def step(self: Module, rows: Tensor) -> Any:
        value = 2 * self.error(rows, rows**2)
        self.both(rows, rows)["R2Score"] + 1
        assert value.shape == ()
        return float(value)

    module = Module(step, error=MeanSquaredError(), both=MetricCollection([MeanSquaredError(), R2Score()]))
    recorder = StepRecorder(module)
    rows = torch.arange(4.0)
    with recorder.microbatch(0, 0, 4, None, keep=True):
        step(module, rows)
    recorder.drop()
    assert module.error.update_count == 0
    assert module.error.sum_squared_error == 0
    with (
        pytest.raises(AbsentValueError, match=r"What `self\.error` returns is known where the step ends alone"),
        recorder.microbatch(0, 0, 4, None, keep=False),
    ):
        step(module, rows)


@pytest.mark.parametrize("src", [0, 1])
def test_nothing_is_sent_for_metrics_that_no_step_changed(src: int) -> None:
    """So that other ranks need not take part."""
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert run_in_threads(computes_alone, 2, src) == [None, None]


def computes_alone(group: dist.ProcessGroup, src: int) -> None:
    root = nn.ModuleDict({"mean": MeanMetric()})
    with closing(PipelineMetrics(root, group, 1, torch.device("cpu"))):
        if group.rank() == src:
            root["mean"].compute()
