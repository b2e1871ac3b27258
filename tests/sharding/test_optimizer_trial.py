"""What an optimizer treats by itself: elements, parameters, or only all of them at once; tried without touching it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_smddp.sharding.optimizer_trial import why_not_elementwise, why_not_one_by_one


class Own(optim.Optimizer):
    """Of the user's own: steps one group after the other."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.decay = {"rate": 0.9}
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.update(group["params"], group)

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Sign(Own):
    """With state and an attribute besides."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        for p in params:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.mul_(self.decay["rate"]).add_(p.grad)
            p.sub_(group["lr"] * mean.sign())


class Elementwise(Sign):
    elementwise = True


class HoldsParameters(Own):
    """Steps what it has in an attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.all = [p for group in self.param_groups for p in group["params"]]

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        for p in self.all:
            if p.grad is not None:
                p.sub_(group["lr"] * p.grad.sign())


class GlobalNorm(Own):
    """Divides by the norm of all gradients."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(group["lr"] * p.grad / norm)


class ClipsItself(Own):
    """By the norm of all gradients, if that is large."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(1e-3 * p.grad / max(1.0, float(norm) / 1000))


class Adapts(Own):
    """Prodigy-like: the further all parameters together have gone, the larger the steps; first they are tiny."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        found = [(p, self.state[p].setdefault("start", p.clone())) for p in params]
        gone = sum(float(((start - p) * p.grad).sum()) for p, start in found)
        size = max(group.get("size", 1e-6), gone / sum(float(p.grad.abs().sum()) for p, _ in found))
        group["size"] = size
        for p, _ in found:
            p.sub_(size * p.grad.sign())


class Turns(Own):
    """Conjugate gradients after Fletcher and Reeves: directions are added by how the norm of all gradients changes."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        norm = sum(float(p.grad.square().sum()) for p in params)
        kept = norm / group.get("norm", norm)
        group["norm"] = norm
        for p in params:
            direction = self.state[p].setdefault("direction", torch.zeros_like(p))
            direction.mul_(kept).sub_(p.grad)
            p.add_(direction, alpha=group["lr"])


class Restarts(Own):
    """Momentum that begins anew where it goes against all gradients."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        found = [(p, self.state[p].setdefault("momentum", torch.zeros_like(p))) for p in params]
        goes_against = sum(float((p.grad * momentum).sum()) for p, momentum in found) < 0
        for p, momentum in found:
            momentum.mul_(0.0 if goes_against else 0.9).add_(p.grad)
            p.sub_(momentum, alpha=group["lr"])


class Estimates(Own):
    """As D-Adaptation does it: what it finds out of all gradients changes the steps only much later."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        norm = sum(float(p.grad.square().sum()) for p in params)
        group["estimate"] = group.get("estimate", 0.0) + norm
        for p in params:
            p.sub_(p.grad.sign(), alpha=max(group["lr"], 1e-30 * group["estimate"]))


class NeedsClosure(Own):
    def step(self, closure: Any = None) -> None:
        assert closure is not None


class Noisy(Own):
    """Langevin dynamics: a step adds noise."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        for p in params:
            p.sub_(group["lr"] * p.grad).add_(torch.randn_like(p), alpha=1e-3)


class LayerScaled(Own):
    """LARS-like: the learning rate depends on the parameter's norm."""

    def update(self, params: list[Any], group: dict[str, Any]) -> None:
        for p in params:
            p.sub_(group["lr"] * p.grad * p.norm() / (p.grad.norm() + 1e-9))


def module() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(40, 30), nn.LayerNorm(30))


@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW, optim.RAdam, optim.RMSprop, Elementwise])
def test_elements(make: Any) -> None:
    optimizer = make(module().parameters(), lr=0.1)
    assert why_not_elementwise(optimizer) is why_not_one_by_one(optimizer) is None


class OwnAdam(optim.Adam):
    """What it does is not looked up."""


@pytest.mark.parametrize("make", [optim.Adafactor, Sign, OwnAdam, HoldsParameters, LayerScaled])
def test_whole_parameters(make: Any) -> None:
    optimizer = make(module().parameters())
    assert why_not_one_by_one(optimizer) is None
    assert f"`{make.__name__}.elementwise = True`" in (why_not_elementwise(optimizer) or "")


@pytest.mark.parametrize(
    "make", [GlobalNorm, ClipsItself, Adapts, Turns, Restarts, Estimates, NeedsClosure, Noisy, optim.LBFGS]
)
@pytest.mark.parametrize("count", [1, 6])
def test_all_at_once(make: Any, count: int) -> None:
    """Also with a single parameter, where nothing else is there to depend on."""
    optimizer = make(list(module().parameters())[:count])
    assert why_not_one_by_one(optimizer)


def test_a_schedule_that_begins_with_zero_hides_nothing() -> None:
    for make, is_one_by_one in ((LayerScaled, True), (GlobalNorm, False)):
        optimizer = make(module().parameters())
        optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0.0
        assert (why_not_one_by_one(optimizer) is None) is is_one_by_one


@pytest.mark.parametrize("kind", [optim.AdamW, Sign, HoldsParameters, GlobalNorm])
def test_a_trial_changes_nothing(kind: Any) -> None:
    layers = module()
    optimizer = kind(layers.parameters(), lr=0.5)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step`
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in layers.parameters()]
    drawn = torch.random.get_rng_state()
    why_not_one_by_one(optimizer)
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, layers.parameters(), strict=True))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in layers.parameters() if p.grad is not None)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state
    assert calls == []
    assert schedule.last_epoch == 0
