"""``smddp_fsdp`` with manual optimization: several optimizers and backward passes in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import run_trainer_ranks
from tests.sharding.test_fsdp import Block, fully_sharded
from tests.strategies.learners import Learner, Outcome, assert_equal, make_trainer, outcome, silent


class Adversaries(Learner):
    """A GAN: two optimizers, modules in units and in the root, frozen in turn."""

    def __init__(self, count: int) -> None:
        super().__init__(count=count)
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator = nn.Sequential(Block(8), Block(8))
        self.out = nn.Linear(8, 8)
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)

    def judged(self, x: Tensor) -> Tensor:
        return self.head(self.critic(x))

    def made(self, x: Tensor) -> Tensor:
        return self.out(self.generator(x.flip(1)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, (making, judging) = batch[0], self.optimizers()
        self.toggle_optimizer(making)
        loss = F.softplus(-self.judged(self.made(x))).mean()
        making.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(making, 0.5, "norm")
        making.step()
        self.untoggle_optimizer(making)
        self.toggle_optimizer(judging)
        other = F.softplus(self.judged(self.made(x).detach())).mean()
        judging.zero_grad()
        self.manual_backward(other)
        self.manual_backward(F.softplus(-self.judged(x)).mean())
        judging.step()
        self.untoggle_optimizer(judging)
        self.losses += [loss.item(), other.item()]

    def configure_optimizers(self) -> Any:
        making = [*self.generator.parameters(), *self.out.parameters()]
        judging = [*self.critic.parameters(), *self.head.parameters()]
        return torch.optim.AdamW(making, lr=0.01), torch.optim.RMSprop(judging, lr=0.01)


class Closures(Adversaries):
    """Accumulates by hand, and steps with a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, _ = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(self.made(batch[0]), batch[0])
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(F.mse_loss(self.made(batch[0] + 1), batch[0]))
        self.manual_backward(F.mse_loss(self.made(batch[0] - 1), batch[0]))
        optimizer.step()


# How each is sharded: what turns change does not depend on it.
CASES: dict[type[Adversaries], list[str]] = {
    Adversaries: ["full", "grad_op"],
    Closures: ["full", "grad_op"],
}


def fit(make: type[Adversaries], sharding: str | None) -> Outcome:
    strategy = silent(find_unused_parameters=True)
    if sharding is not None:
        strategy = fully_sharded(sharding=sharding)
    model = make(count=24)
    trainer = make_trainer(strategy)
    trainer.fit(model)
    return outcome(model, trainer)


def fit_each() -> dict[str, tuple[Outcome, list[Outcome]]]:
    """Of each case what data parallelism gives, and what each sharding does."""
    found = {}
    for make, shardings in CASES.items():
        found[make.__name__] = fit(make, None), [fit(make, sharding) for sharding in shardings]
    return found


@pytest.mark.slow
def test_the_same_numbers_as_data_parallelism():
    for results in run_trainer_ranks(fit_each, 2):
        for case, (expected, others) in results.items():
            for actual in others:
                try:
                    assert_equal(actual, expected, tolerance=1e-5)
                except AssertionError as error:
                    raise AssertionError(f"{case}: {error}") from None
