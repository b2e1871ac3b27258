"""``smddp_fsdp`` on simulated CUDA devices: the same numbers as ``smddp`` there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_trainer_ranks
from tests.sharding.test_fsdp import AdamLearner, fully_sharded
from tests.strategies.learners import Outcome, assert_equal, make_trainer, outcome, silent

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


CASES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "32-true": (AdamLearner, {"gradient_clip_val": 0.1}, 1e-5),
    "bf16-mixed": (AdamLearner, {"precision": "bf16-mixed"}, 0.05),
    "16-mixed": (Overflowing, {"precision": "16-mixed", "gradient_clip_val": 0.1}, 0.01),
}


def fit_both(case: str) -> list[Outcome]:
    make, options, _ = CASES[case]
    found = []
    for strategy in (silent(), fully_sharded()):
        model = make()
        trainer = make_trainer(strategy, max_epochs=1, **options)
        trainer.fit(model)
        found.append(outcome(model, trainer))
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_the_same_numbers_as_smddp(case):
    for expected, actual in run_trainer_ranks(fit_both, 2, case):
        assert_equal(actual, expected, tolerance=CASES[case][2])
        if case == "16-mixed":  # one step of six was left out, on all ranks
            assert actual.losses[-5:] == [2.0**15, 5, 5, 5, 5]
