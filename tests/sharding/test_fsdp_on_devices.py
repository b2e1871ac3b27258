"""``smddp_fsdp`` on simulated CUDA devices; ``test_numbers.py`` has other numbers there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.ranks import run_trainer_ranks
from tests.sharding.learners import AdamLearner, fully_sharded
from tests.strategies.learners import Outcome, assert_equal, fit, make_trainer, outcome, silent

pytestmark = [pytest.mark.simulated_cuda, pytest.mark.slow]


class Overflowing(AdamLearner):
    """In one step a gradient overflows with the scale of the loss, in the part of the first rank alone."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        if len(self.losses) == 2:
            row = self.net[0].weight[0].float()
            loss = loss + ((row - row.detach()) * 1e36).sum()
        return loss

    def on_train_end(self) -> None:
        state = self.optimizers().optimizer.state.values()
        self.losses += [self.trainer.precision_plugin.scaler.get_scale(), *(float(each["step"]) for each in state)]


def fit_overflowing() -> list[Outcome]:
    options = {"precision": "16-mixed", "gradient_clip_val": 0.1, "max_epochs": 1}
    return [fit(strategy, Overflowing(), **options) for strategy in (silent(), fully_sharded())]


class Looking(Callback):
    """Where parameters, gradients and optimizer states are, and what is made of them in hooks."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        states = [state["exp_avg"] for state in optimizer.state.values()]
        for parameter in pl_module.parameters():
            self.seen |= {parameter.device.type, parameter.grad.device.type, *(state.device.type for state in states)}
            self.norms.append(parameter.grad.norm().item())
            with torch.no_grad():
                parameter.mul_(0.99)


def fit_some(strategy: Any, epochs: int, path: str | None = None, save: str | None = None) -> tuple[Outcome, Looking]:
    model, looking = AdamLearner(), Looking()
    trainer = make_trainer(strategy, max_epochs=epochs, gradient_clip_val=0.1, callbacks=[looking])
    trainer.fit(model, ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome(model, trainer), looking


def fit_offloaded(folder: str) -> list[Outcome]:
    """Shares on the host, for which a gradient scaler is refused; and steps that overflow."""
    path = f"{folder}/first.ckpt"
    expected, seen = fit_some(silent(), 2)
    begun, first = fit_some(fully_sharded(cpu_offload=True), 1, save=path)
    ended, second = fit_some(fully_sharded(cpu_offload=True), 2, path)
    assert_equal(Outcome(begun.losses + ended.losses, ended.weights), expected, tolerance=1e-5)
    torch.testing.assert_close(first.norms + second.norms, seen.norms, rtol=1e-4, atol=1e-6)
    assert seen.seen == {"cuda"}
    assert first.seen == second.seen == {"cpu"}
    with pytest.raises(ValueError, match="precision='16-mixed' cannot be used with cpu_offload=True"):
        make_trainer(fully_sharded(cpu_offload=True), precision="16-mixed").fit(AdamLearner())
    return fit_overflowing()


def test_shares_on_the_host_and_a_step_that_overflows_on_one_rank_is_left_out_on_all(tmp_path):
    for expected, actual in run_trainer_ranks(fit_offloaded, 2, str(tmp_path)):
        assert_equal(actual, expected, tolerance=0.01)
        assert actual.losses[-5:] == [2.0**15, 2, 2, 2, 2]
