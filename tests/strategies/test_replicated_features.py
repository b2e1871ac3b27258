"""Features of the Trainer in runs whose training step cannot be pipelined: what one process has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smddp import PipelineStrategy
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, make_trainer
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, assert_same, name_of, outcome
from tests.strategies.test_pipeline_features import scaled
from tests.strategies.test_pipeline_replicated import Manual, Penalty, Queue, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore:The training step is run as a whole on every rank:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Gradients are not finite in step:UserWarning"),
]


class EvaluatedPenalty(Penalty, Evaluated):
    """A gradient penalty, and the other three steps."""


SHORT = {"limit_val_batches": 1}

# ---- checkpoints ----


def resumed(bench: Bench, make: Callable[[], Net], sharded: bool, **options: Any) -> Any:
    """Stopped in the middle of an epoch and gone on with, against one process that went through."""
    if bench.pipeline is None:
        return _of_resumed(fit(bench, make(), max_epochs=3, **SHORT, **options))
    pipeline = {"sharded": sharded}
    saving = ModelCheckpoint(f"{bench.directory}-{sharded}-{make.__name__}", save_last=True, every_n_train_steps=1)
    callbacks = {"enable_checkpointing": True, "callbacks": [saving]}
    steps: dict[str, Any] = {"max_steps": 7 if options else 8, "max_epochs": -1, **SHORT}
    fit(bench, make(), pipeline=pipeline, **steps, **callbacks, **options)
    model, trainer = make(), bench.trainer(pipeline, max_epochs=3, **SHORT, **options)
    trainer.fit(model, ckpt_path=saving.last_model_path)
    return _of_resumed(outcome(model, trainer))


def _of_resumed(found: dict[str, Any]) -> dict[str, Any]:
    return {"weights": found["weights"], "steps": found["steps"], "losses": found["losses"][-3:]}


def resumed_runs(bench: Bench) -> Any:
    """With dropout, and between two batches whose gradients are added up."""
    many: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    return [resumed(bench, Manual, sharded=True), resumed(bench, EvaluatedPenalty, sharded=False, **many)]


def more_resumed_runs(bench: Bench) -> Any:
    """With a queue, and from a file."""
    return [resumed(bench, Manual, sharded=False), resumed(bench, Queue, sharded=True)]


# ---- gradients ----


class Overflowing(Penalty):
    """A loss that is infinite in the third batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 else loss


def loss_scale(bench: Bench) -> Any:
    plugin = scaled(init_scale=2.0**12, growth_interval=3)
    result = fit(bench, Overflowing(), plugins=[plugin], gradient_clip_val=0.5)
    return result["weights"], result["steps"], plugin.scaler.get_scale()


class Cautious(Overflowing):
    """Leaves out the steps that ``on_nonfinite="skip"`` leaves out."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not all(p.grad is None or p.grad.isfinite().all() for p in self.parameters()):
            optimizer.zero_grad()


def skipped_step(bench: Bench) -> Any:
    model = Cautious() if bench.pipeline is None else Overflowing()
    return fit(bench, model, pipeline={"on_nonfinite": "skip"})["weights"]


def clipping_and_accumulation(bench: Bench) -> Any:
    by_value = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    options: list[Any] = [{"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}, by_value]
    return [fit(bench, EvaluatedPenalty(), **SHORT, **chosen) for chosen in options]


# ---- callbacks and other steps ----


def averages(bench: Bench) -> Any:
    callbacks = [
        StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
        WeightAveraging(avg_fn=lambda average, now, count: average + (now - average) / (count + 1)),
    ]
    return [fit(bench, EvaluatedPenalty(), callbacks=[callback], max_epochs=3, **SHORT) for callback in callbacks]


def moving_average(bench: Bench) -> Any:
    return fit(bench, EvaluatedPenalty(), callbacks=[EMAWeightAveraging(decay=0.9)], max_epochs=3, **SHORT)


def other_steps(bench: Bench) -> Any:
    torch.manual_seed(7)
    model, trainer = EvaluatedPenalty(), bench.trainer(max_epochs=1)
    before = trainer.validate(model, verbose=False)
    trainer.fit(model)
    found = [trainer.validate(model, verbose=False), trainer.test(model, verbose=False), trainer.predict(model)]
    return before, outcome(model, trainer), found


# ---- manual optimization ----


class SimSiam(Evaluated):
    """Two views, and a scheduler that is stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.predictor = nn.Sequential(nn.Linear(CLASSES, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer, x = self.optimizers(), batch[0]
        first, second = (self.net(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        one = F.cosine_similarity(self.predictor(first), second.detach()).mean()
        other = F.cosine_similarity(self.predictor(second), first.detach()).mean()
        loss = -(one + other) / 2
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        self.losses.append(loss.item())
        return {"loss": loss.detach(), "features": first.detach()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


class Heads(Evaluated):
    """Two losses that share a trunk, two optimizers, one of them toggled, and steps in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.one, self.two = nn.Linear(CLASSES, 4), nn.Linear(CLASSES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        features = self.net(batch[0])
        losses = self.one(features).pow(2).mean(), F.mse_loss(self.two(features)[:, 0], batch[1].float())
        self.manual_backward(losses[0], retain_graph=True)
        self.manual_backward(losses[1] * 0.3)
        if batch_idx % 2 == 1:
            self.clip_gradients(first, 0.5, "norm")
            self.clip_gradients(second, 0.1, "value")
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        with first.toggle_model():
            self.manual_backward(self.loss(batch))
        self.losses += [loss.item() for loss in losses]
        self.log_dict({"first": losses[0], "second": losses[1]})

    def configure_optimizers(self) -> Any:
        trunk = torch.optim.Adam([*self.net.parameters(), *self.one.parameters()], lr=0.01)
        return [trunk, torch.optim.SGD(self.two.parameters(), lr=0.05)]


def manual_optimization(bench: Bench) -> Any:
    return fit(bench, Heads(), **SHORT)


def two_views(bench: Bench) -> Any:
    return fit(bench, SimSiam(), **SHORT)


CASES: list[Case] = [
    resumed_runs, loss_scale, skipped_step, clipping_and_accumulation, averages, other_steps, manual_optimization,
]  # fmt: skip
MORE_CASES: list[Case] = [more_resumed_runs, moving_average, two_views]
FEATURES, MORE = Matrix(CASES), Matrix(MORE_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_as_in_one_process(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    FEATURES.compare(case, str(tmp_path_factory.getbasetemp()), tolerance=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES, ids=name_of)
def test_more_as_in_one_process(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    MORE.compare(case, str(tmp_path_factory.getbasetemp()), tolerance=1e-6)


def nonfinite() -> str:
    try:
        make_trainer(PipelineStrategy(**grouped(verbose=False))).fit(Overflowing())
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_gradients_that_are_not_finite_are_named() -> None:
    for rank, error in enumerate(run_trainer_ranks(nonfinite, 2)):
        assert f"step 2 (epoch 0, batch 2): on rank {rank}" in error
        assert "net.0.weight (nan in " in error


def gone_on_in_parts(directory: str) -> Any:
    results = []
    for begun, sharded in ((False, False), (True, True)):
        strategy = PipelineStrategy(**grouped(verbose=False, sharded=sharded))
        if begun:
            first = make_trainer(strategy, max_epochs=1)
            first.fit(Queue())
            first.save_checkpoint(f"{directory}/parts")
        model, trainer = Queue(), make_trainer(PipelineStrategy(**grouped(verbose=False)), max_epochs=2)
        trainer.fit(model, ckpt_path=f"{directory}/parts" if begun else None)
        results.append([dict(model.state_dict()), trainer.optimizers[0].state_dict()["state"]])
    return results


def test_sharded_checkpoints(tmp_path: Path) -> None:
    """A rank that gives nothing of an optimizer failed the save: what it gave had no ``state``."""
    for through, gone_on in run_trainer_ranks(gone_on_in_parts, 2, str(tmp_path)):
        assert_same(gone_on, through, 0.0)
