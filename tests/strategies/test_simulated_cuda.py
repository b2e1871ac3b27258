"""On simulated CUDA devices: training as on the CPU, and how often a step makes the host wait for the device."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.nn import functional as F

from lightning_smddp import PipelineStrategy
from tests.ranks import run_trainer_ranks
from tests.simulated_cuda.synchronisations import counted, table
from tests.strategies.learners import Learner, assert_equal, fit, silent
from tests.strategies.pipeline_learners import Bench, Net, assert_same

pytestmark = pytest.mark.simulated_cuda


def fit_data_parallel(algorithms: list[str]) -> list[Any]:
    strategies = ["ddp", "smddp", *(silent(algorithm=name) for name in algorithms)]
    return [fit(strategy, Learner(), max_epochs=1) for strategy in strategies]


@pytest.mark.parametrize(("ranks", "algorithms"), [(1, []), (2, ["native", "hierarchical", "balanced"])])
def test_smddp_equals_one_process(ranks: int, algorithms: list[str]) -> None:
    alone = fit("auto", Learner(batch_size=4 * ranks), accelerator="cpu", max_epochs=1)
    for stock, *outcomes in run_trainer_ranks(fit_data_parallel, ranks, algorithms):
        for ours in outcomes:
            assert_equal(ours, stock)
            assert_same(ours.weights, alone.weights)


def fit_pipelines() -> list[Any]:
    layouts = [{"schedule": "1f1b"}, {"schedule": "interleaved_zero_bubble", "stages_per_rank": 2}]
    return [Bench(layout).fit(Net(), max_epochs=1)["weights"] for layout in layouts]


@pytest.mark.parametrize("ranks", [1, 2])
def test_pipelines_equal_one_process(ranks: int) -> None:
    alone = fit("auto", Net(), accelerator="cpu", max_epochs=1)
    for outcomes in run_trainer_ranks(fit_pipelines, ranks):
        for weights in outcomes:
            assert_same(weights, alone.weights)


# ---- host synchronisations ----

# Of a pipeline's step, without user code that asks for values. To come down to 2.
PER_STEP, PER_MICROBATCH = 6, 0


class CountOneStep(Callback):
    """Those of the fourth step; the first ones prepare things."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._stack = ExitStack()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.counts = self._stack.enter_context(counted())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stack.close()


class Silent(Net):
    """Asks for no value on the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


def count_data_parallel() -> list[Any]:
    return [_counted_fit(strategy) for strategy in ("ddp", silent())]


def count_pipelines() -> list[Any]:
    quiet = {"verbose": False, "tuning_cache": False}
    return [_counted_fit(PipelineStrategy(num_microbatches=count, **quiet)) for count in (2, 4)]


def _counted_fit(strategy: Any) -> Counter[tuple[str, str]]:
    counts = CountOneStep()
    fit(strategy, Silent(), max_epochs=1, callbacks=[counts])
    return counts.counts


def test_synchronisations_of_a_data_parallel_step() -> None:
    for stock, ours in run_trainer_ranks(count_data_parallel, 2):
        assert ours.total() <= stock.total() + 1, f"ddp:\n{table(stock)}\nsmddp:\n{table(ours)}"


def test_synchronisations_of_a_pipeline_step() -> None:
    for few, many in run_trainer_ranks(count_pipelines, 2):
        places = f"2 micro-batches:\n{table(few)}\n4 micro-batches:\n{table(many)}"
        per_microbatch = (many.total() - few.total()) / 2
        assert per_microbatch <= PER_MICROBATCH, places
        assert few.total() - 2 * per_microbatch <= PER_STEP, places
