"""A LightningModule without a Trainer, and its step in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_smddp.bridge.capture import StepCapture


class Module(LightningModule):
    """``step`` is the user's code; what reaches Lightning's ``log`` is kept."""

    def __init__(self, step: Callable[..., Any], **metrics: nn.Module) -> None:
        super().__init__()
        self.step, self.logged = step, []
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        shown = value.compute() if isinstance(value, nn.Module) else torch.as_tensor(value)
        self.logged.append((name, shown.tolist(), kwargs))

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value, _ in self.logged]


def run(module: Module, sizes: list[int], capture: StepCapture | None = None, **options: Any) -> Any:
    """Run the step on rows 0, 1, 2, ... cut into micro-batches of ``sizes``; returns what the step does."""
    capture = capture or StepCapture(module, **options)
    rows = torch.arange(float(sum(sizes))).split(sizes)
    outputs = []
    for index, part in enumerate(rows):
        with capture.microbatch(index, len(part), keep=False):
            module.step(module, part)
        with capture.microbatch(index, len(part)):
            outputs.append(capture.finish(module.step(module, part)))
    return capture.results(outputs).apply(module)


def whole(module: Module, count: int) -> Any:
    """The same in one call."""
    return module.step(module, torch.arange(float(count)))
