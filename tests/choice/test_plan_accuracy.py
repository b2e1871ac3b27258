"""What is predicted is what ranks then hold, within 15 %. ``benchmarks/plan_accuracy.py`` has more models."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_smddp import PipelineStrategy, SMDDPStrategy, plan
from tests.choice.modules import Wide
from tests.growth import Growth, measurable
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer

STRATEGIES = {
    "smddp": (SMDDPStrategy, {}),
    "smddp, shard='optimizer'": (SMDDPStrategy, {"shard": "optimizer"}),
    "smddp_pipeline": (PipelineStrategy, {}),
}
RANKS, STEPS = 2, 2


class Ends(Callback):
    """Behind training a pipeline's model is gathered on hosts, if they have room: that is no part of it."""

    def __init__(self, done: threading.Event) -> None:
        self.done = done

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.done.set()


def measure(strategy: str) -> int:
    """What training adds at most to what a process has."""
    measurable()
    made, options = STRATEGIES[strategy]
    growth = Growth(RANKS)
    trainer = make_trainer(made(**grouped(verbose=False, **options)), max_steps=STEPS, callbacks=[Ends(growth.done)])
    with growth.watching():
        trainer.fit(Wide())
    return growth.most


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [list(STRATEGIES)[1:], pytest.param(list(STRATEGIES)[:1], marks=pytest.mark.exhaustive)],
    ids=["shared or divided", "copies"],
)
def test_ranks_hold_what_was_predicted(strategies: list[str]) -> None:
    found = plan(Wide(), RANKS, 4.0)
    predicted = {estimate.name: estimate.memory for estimate in found.estimates}
    for strategy in strategies:
        memory = predicted[strategy]
        assert memory is not None
        assert memory.total == pytest.approx(max(run_trainer_ranks(measure, RANKS, strategy)), rel=0.15), strategy
