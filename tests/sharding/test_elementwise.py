"""What an optimizer treats by itself: elements, parameters, or only all of them at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from lightning_smddp.sharding.elementwise import Granularity, granularity


class GlobalNorm(optim.SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


class LayerScaled(optim.SGD):
    """LARS-like: the learning rate depends on the parameter's norm."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.detach().norm() / (p.grad.norm() + 1e-9))
        return super().step(closure)


class Noisy(optim.SGD):
    """Langevin dynamics: a step adds noise."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.randn_like(p), alpha=1e-3)


class Blocks(optim.SGD):
    """Treats blocks of 256 elements, as optimizers with 8-bit states do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                flat = p.grad.view(-1)
                for low in range(0, flat.numel(), 256):
                    flat[low : low + 256] /= flat[low : low + 256].abs().max()
        return super().step(closure)


class WithAttribute(optim.SGD):
    """Has an attribute that is in no state."""

    def __init__(self, params, factor):
        self.factor = factor
        super().__init__(params, lr=0.1)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(self.factor)
        return super().step(closure)


def module():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 5))


ELEMENTWISE = [
    lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: optim.AdamW(p, amsgrad=True),
    lambda p: optim.AdamW(p, fused=True),
    lambda p: optim.AdamW(p, foreach=True),
    lambda p: optim.AdamW(p, lr=torch.tensor(0.1)),
    lambda p: optim.NAdam(p),
    lambda p: optim.RAdam(p),
    lambda p: optim.RMSprop(p, centered=True),
    lambda p: optim.Adagrad(p),
    lambda p: optim.Adadelta(p),
    lambda p: optim.ASGD(p),
    lambda p: optim.Rprop(p),
    lambda p: optim.Adamax(p),
    lambda p: WithAttribute(p, 0.9),
]


@pytest.mark.parametrize("make", ELEMENTWISE)
def test_elements(make):
    assert granularity(make(module().parameters())) == (Granularity.ELEMENT, "")


@pytest.mark.parametrize("make", [optim.Adafactor, lambda p: LayerScaled(p, lr=0.1), lambda p: Blocks(p, lr=0.1)])
def test_whole_parameters(make):
    found, why = granularity(make(module().parameters()))
    assert found is Granularity.PARAMETER
    assert "part of a parameter" in why


def test_muon_needs_whole_matrices():
    found, why = granularity(optim.Muon([module()[1].weight]))
    assert found is Granularity.PARAMETER
    assert "failed" in why


@pytest.mark.parametrize("make", [lambda p: GlobalNorm(p, lr=0.1), lambda p: Noisy(p, lr=0.1), optim.LBFGS])
def test_all_at_once(make):
    found, why = granularity(make(module().parameters()))
    assert found is Granularity.NONE
    assert why


def test_one_parameter_alone_shows_what_depends_on_others():
    assert granularity(GlobalNorm([nn.Parameter(torch.zeros(3))], lr=0.1))[0] is Granularity.NONE


def test_a_schedule_that_begins_with_zero_hides_nothing():
    optimizer = LayerScaled(module().parameters(), lr=0.1)
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert granularity(optimizer)[0] is Granularity.PARAMETER


def test_a_trial_changes_nothing():
    layers = module()
    optimizer = optim.AdamW(layers.parameters(), lr=0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    before = [p.detach().clone() for p in layers.parameters()]
    drawn = torch.random.get_rng_state()
    granularity(optimizer)
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, layers.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state
    assert calls == []
    assert schedule.last_epoch == 0
