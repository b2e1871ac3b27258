"""What a pipeline cannot do is said by name, on every rank, and nothing hangs."""

from __future__ import annotations

import itertools
import os
import re
import threading
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelPruning
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanSquaredError

from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Cases, Evaluated, Net


def refused(make: Any, options: dict[str, Any], trainer_options: dict[str, Any]) -> str:
    """Body of a rank: the error that ``fit`` raises."""
    try:
        trainer_options = {key: value() if callable(value) else value for key, value in trainer_options.items()}
        Bench({"collective_timeout": 30}).trainer(options, **trainer_options).fit(make())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


pytestmark = pytest.mark.filterwarnings("ignore:.*dataloader_iter:UserWarning")

# ---- at start ----


class FromIterator(Evaluated):
    def validation_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


class NoScalar(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")


class Detached(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch).detach()


class LogsOverItsGroup(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.log("x", 1.0, sync_dist_group=object())
        return super().training_step(batch, batch_idx)


class ReturnsLock(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "lock": threading.Lock()}


class ReadsMetric(Net):
    """Where the step does not end what metrics return cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        error = float(self.error(batch[0], batch[0] ** 2) / 2)
        return super().training_step(batch, batch_idx) * error


class OtherEachTime(Net):
    runs = itertools.count()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = self.net[:2](batch[0])
        for _ in range(next(self.runs) + 0 * int(batch[1][0])):
            x = x * 1.01
        return F.cross_entropy(self.net[2:](x), batch[1])


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 2)]


class SampledByHand(Net):
    """Takes each rank for a replica, as scripts written for data parallelism do."""

    def train_dataloader(self) -> Any:
        data = samples(self.count)
        return DataLoader(data, batch_size=8, sampler=DistributedSampler(data))


class HooksInStep(Net):
    """Registers a hook in its first step: with micro-batches there would be several."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.trainer.global_step == 0:
            self.net[0].weight.register_hook(lambda g: g.clamp(-0.02, 0.02))
        return super().training_step(batch, batch_idx)


def pruning() -> Any:
    return [ModelPruning("l1_unstructured")]


PRUNING = (Net, {}, {"callbacks": pruning})
MODULES = [
    ("FromIterator.validation_step takes `dataloader_iter`", FromIterator, {}),
    ("`training_step` returned float32[8]", NoScalar, {}),  # of micro-batches with one row
    ("does not depend on any parameter", Detached, {}),
    ("leave `sync_dist_group` out", LogsOverItsGroup, {}),
    ("It cannot be sent to other ranks", ReturnsLock, {"num_microbatches": 1}),
    ("What `self.error` returns is known where the step ends alone", ReadsMetric, {}),
    ("The step takes another path each time", OtherEachTime, {}),
    ("multiple optimizers is only supported with manual", TwoOptimizers, {}),
]
LAYOUTS = [
    ("net.99", Net, {"split": ["net.99"]}),
    ("stages", Net, {"schedule": "interleaved_1f1b", "stages_per_rank": 5}),
    ("use stages_per_rank=1", Net, {"schedule": "1f1b", "stages_per_rank": 2}),
    ("memory_limit_gb, ", Net, {"memory_limit_gb": 1e-9}),
    ("SplitError: found no partition into 2 stages", Net, {"memory_limit_gb": 1e-6}),
]
SAMPLER = ["has num_replicas=2, but there are 1 replicas", "**trainer.distributed_sampler_kwargs)"]
CURED: list[tuple[type[Net], list[str]]] = [
    (SampledByHand, SAMPLER),
    (HooksInStep, ["registers a hook on a parameter at", "test_pipeline_errors.py", "`on_fit_start`"]),
]
AT_START = Cases(
    refused,
    [
        *((make, options, {}) for _, make, options in (*MODULES, *LAYOUTS)),
        *((make, {}, {}) for make, _ in CURED),
        PRUNING,
    ],
)


@pytest.mark.parametrize(("expected", "make", "options"), [*MODULES, *LAYOUTS])
def test_modules_and_layouts(expected: str, make: Any, options: dict[str, Any]) -> None:
    for error in AT_START.results((make, options, {})):
        assert expected in error


@pytest.mark.parametrize(("make", "parts"), CURED)
def test_what_cannot_be_cut_has_its_place_and_what_to_use(make: Any, parts: list[str]) -> None:
    for error in AT_START.results((make, {}, {})):
        for part in parts:
            assert part in error
        if make is not SampledByHand:
            assert "strategy='smddp'" in error


def test_a_callback() -> None:
    for error in AT_START.results(PRUNING):
        assert "ModelPruning replaces parameters of the module" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "options"),
    [("Use num_microbatches=3", {"num_microbatches": 2}), ("pipeline_parallel_size=2", {"pipeline_parallel_size": 2})],
)
def test_three_ranks(expected: str, options: dict[str, Any]) -> None:
    for error in ON_THREE.results((Net, options, {})):
        assert expected in error


# ---- while running ----


class Failing(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == 2:
            raise ZeroDivisionError("the user's own")
        return super().training_step(batch, batch_idx)


RAISED: list[int] = []


class FailingOnce(Net):
    """On the first rank, where the path of the step is looked for; a second run would go on."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == 2 and os.environ["RANK"] == "0" and not RAISED:
            RAISED.append(batch_idx)
            raise ZeroDivisionError("the user's own")
        return super().training_step(batch, batch_idx)


class FailingLate(Evaluated):
    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self.net(batch[0])
        if self.current_epoch == 1:
            raise ZeroDivisionError(f"the user's own, {out.shape}")


class FailingHook(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ZeroDivisionError("the user's own")


@pytest.mark.slow
@pytest.mark.parametrize("model", [Failing, FailingOnce])
def test_exceptions_of_the_user_come_out_as_they_are(model: type[Net]) -> None:
    """In the middle of a run, where the other ranks wait for the first one, they name it."""
    first, *others = ON_THREE.results((model, {}, {}))
    assert first == "ZeroDivisionError: the user's own"
    for error in others:
        assert error == first or (error.startswith("RankFailedError: Rank 0 ") and error.endswith(first))


ON_THREE = Cases(
    refused,
    [
        (Failing, {}, {}),
        (FailingOnce, {}, {}),
        (Net, {"num_microbatches": 2}, {}),
        (Net, {"pipeline_parallel_size": 2}, {}),
    ],
    3,
)


LATE = (FailingLate, {}, {"limit_val_batches": 2, "limit_train_batches": 2})


@pytest.mark.slow
def test_an_exception_that_only_the_last_stage_meets() -> None:
    """And one in a hook, of all ranks."""
    for error in RUNNING.results((FailingHook, {}, {})):
        assert "ZeroDivisionError: the user's own" in error
    first, last = RUNNING.results(LATE)
    assert last.startswith("ZeroDivisionError: the user's own")
    assert re.fullmatch(
        r"RankFailedError: Rank 1 \(host .*, process \d+\) failed at step \d+ \(\w+\): " + re.escape(last), first
    )


class ByRank(Net):
    """From the third batch on its path depends on the process."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = self.net[:2](batch[0])
        if batch_idx == 2 and os.environ["RANK"] == "1":
            x = x * 2
        return F.cross_entropy(self.net[2:](x), batch[1])


@pytest.mark.slow
def test_a_course_that_depends_on_the_rank() -> None:
    """No rank waits for messages of another path: all say the same."""
    first, second = RUNNING.results((ByRank, {}, {}))
    assert first == second
    assert first.startswith("ReplayError: The step came to mul at ")


class OtherLater(Net):
    """From the fifth batch on data depend on the process."""

    def train_dataloader(self) -> Any:
        inputs, labels = samples(48).tensors
        inputs[32:] += int(os.environ["RANK"])
        return DataLoader(TensorDataset(inputs, labels), batch_size=8)


@pytest.mark.slow
def test_batches_that_differ_later() -> None:
    for error in RUNNING.results((OtherLater, {}, {})):
        assert "have different batches" in error


@pytest.mark.slow
def test_learning_rate_finder_ends() -> None:
    """It restores a checkpoint in the middle of a run."""
    assert RUNNING.results(FINDER) == ["nothing"] * 2


class WithRate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def finder() -> Any:
    return [LearningRateFinder(num_training_steps=8)]


FINDER = (WithRate, {}, {"callbacks": finder, "max_epochs": 1})
# The last one ends with its process, which the other one waits for.
RUNNING = Cases(refused, [FINDER, (FailingHook, {}, {}), (ByRank, {}, {}), (OtherLater, {}, {}), LATE])
