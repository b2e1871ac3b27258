"""Which optimizers a pipeline may divide: tried out without touching them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_smddp.pipeline.state.optimizer_trial import steps_one_by_one


class Sign(Optimizer):
    """Of the user's own, with state and an attribute besides."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.decay = {"rate": 0.9}
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(self.decay["rate"]).add_(p.grad)
                p.sub_(group["lr"] * mean.sign())


class GlobalNorm(Sign):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        everything = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in everything]).norm()
        for p in everything:
            p.sub_(0.1 * p.grad / norm)


class ClipsItself(Sign):
    """By the norm of all gradients, if that is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        everything = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in everything]).norm()
        for p in everything:
            p.sub_(1e-3 * p.grad / max(1.0, float(norm) / 1000))


class NeedsClosure(Sign):
    def step(self, closure: Any = None) -> None:
        assert closure is not None


class Noisy(Sign):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(torch.randn_like(p))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(torch.optim.AdamW, True), (torch.optim.LBFGS, False), (Sign, True), (GlobalNorm, False),
     (ClipsItself, False), (NeedsClosure, False),
     (Noisy, False)],
)  # fmt: skip
def test_what_is_found(kind: Any, expected: bool) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 5))
    optimizer = kind(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step`
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    assert steps_one_by_one(optimizer) is expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
