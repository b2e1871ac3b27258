from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_smddp.bridge.capture import StepCapture
from tests.strategies.noisy_module import assert_same
from tests.strategies.steps import Module, run, whole


def test_lists_grow_once() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.batches.append(rows)
        self.batches.append({"mean": rows.mean(), "name": "x"})
        self.texts.extend(f"{value:.0f}" for value in rows)
        self.by_loader[0].append((rows, len(rows)))
        self.by_name.setdefault("new", []).append(rows)
        self.replaced = self.replaced + [rows]
        self.nested.append([rows])

    def make() -> Module:
        module = Module(step)
        module.batches, module.texts, module.by_loader, module.by_name = [1], [], [[], []], {}
        module.replaced, module.nested = [], []
        return module

    actual, expected = make(), make()
    for _ in range(2):
        run(actual, [3, 3, 2])
        whole(expected, 8)
    for name in ("batches", "texts", "by_loader", "by_name", "replaced", "nested"):
        assert_same(getattr(actual, name), getattr(expected, name))


def test_rows_in_micro_batches_of_one_row() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.numbers.extend(rows.tolist())
        self.steps += 1
        self.rows += len(rows)

    module = Module(step)
    module.numbers, module.steps, module.rows = [], 0, 0
    capture = StepCapture(module)
    run(module, [2, 2], capture)
    run(module, [1, 1, 1], capture)
    assert (module.numbers, module.steps, module.rows) == ([0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0], 2, 7)


def test_attributes_are_set_once() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.total = self.total + rows.mean().item()
        self.state = (rows, {"h": rows.mean()})
        self.text = "same"
        self.first = f"row {rows[0]}"
        self.helper = object()

    module = Module(step)
    module.total, module.state = 1.0, None
    run(module, [3, 2])
    assert (module.total, module.text, module.first) == (pytest.approx(3.0), "same", "row 3.0")
    torch.testing.assert_close(module.state, (torch.arange(5.0), {"h": torch.tensor(2.0)}))
