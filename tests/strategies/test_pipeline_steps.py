"""Odd steps: data that differ between ranks, batches of unknown objects, random numbers, and ever new paths."""

from __future__ import annotations

import functools
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp.patches import patched
from lightning_smddp.pipeline.runtime import trace_cache
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Gpt, Matrix, Net, assert_same, name_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:smddp_pipeline runs batches as one micro-batch:UserWarning"),
    pytest.mark.filterwarnings("ignore:The loss of:UserWarning"),  # rows are mixed with others
]

# ---- data that differ between ranks: the first one's count ----


class Shuffled(Net):
    """Each rank draws other random numbers from the first batch on."""

    def on_fit_start(self) -> None:
        torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))

    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.count), batch_size=self.batch_size, shuffle=True)


def shuffled(bench: Bench) -> Any:
    return bench.fit(Shuffled(count=16))


# ---- more kinds of micro-batches than are remembered ----


def forgotten(bench: Bench) -> Any:
    with patched([(vars(trace_cache), "_KEPT", 1)]):
        return bench.fit(Gpt(), max_epochs=1)


# ---- random numbers: those of accumulation, whoever draws them; the same on all ranks behind a run ----


class DrawingInHooks(Evaluated):
    """Torch draws on all ranks in hooks; ``dropout`` also on the rank that has it."""

    def __init__(self, dropout: float) -> None:
        super().__init__(count=16)
        self.net[3] = nn.Sequential(self.net[3], nn.Dropout(dropout))

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(torch.rand(()).item())

    def on_validation_epoch_end(self) -> None:
        self.losses.append(torch.randn(3).sum().item())


def behind_runs(bench: Bench, dropout: float) -> list[Any]:
    torch.manual_seed(3)
    random.seed(4)
    model, trainer = DrawingInHooks(dropout), bench.trainer({"num_microbatches": 2}, max_epochs=1)
    drawn: list[Any] = []
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        loaders = {} if run == trainer.fit else {"dataloaders": model.train_dataloader()}
        run(model, **loaders)
        drawn.append((torch.rand(3), random.random()))
    return [drawn, model.losses]


# ---- paths ----


class Selected(Net):
    """Goes on with some rows of the batch, more or fewer in each: shapes of batches do not tell."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        positive = batch[0][:, 0] > 0
        x = self.net[:2](batch[0])[positive]
        x = self.net[2:4](x).index_select(0, (x.shape[0] - 1 - positive[positive].nonzero().flatten()))
        return F.cross_entropy(self.net[4:](x), batch[1][positive].flip(0), reduction="sum") / len(batch[0])


def selected(bench: Bench) -> Any:
    return bench.fit(Selected(layers=5), {"num_microbatches": 4})


class Endless(Net):
    """Goes a longer way with each batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        for _ in range(batch_idx):
            x = x * 1.01
        return F.cross_entropy(self.net[4:](x), batch[1])


def endless(bench: Bench) -> str:
    with pytest.raises(ValueError, match="took 16 paths") as caught:
        bench.fit(Endless(count=160), {"num_microbatches": 2}, max_epochs=1)
    return str(caught.value)


PLAIN, WITH_DROPOUT = (functools.partial(behind_runs, dropout=dropout) for dropout in (0.0, 0.5))
CASES: list[Case] = [shuffled, forgotten, PLAIN, selected]
TWO = Matrix([*CASES, WITH_DROPOUT, endless])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


def test_ranks_draw_the_same_behind_a_run_with_dropout() -> None:
    first, second = TWO.results(WITH_DROPOUT)
    assert_same(first, second, 0.0)


def test_more_paths_than_can_be_traced_are_refused_on_all_ranks() -> None:
    first, second = TWO.results(endless)
    assert first == second
    assert first.count("test_pipeline_steps.py") == 2, first


# ---- what is said of batches ----


def rows_in(collate: Callable[[Tensor, Tensor], Any]) -> Any:
    def collated(rows: list[Any]) -> Any:
        return collate(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    return DataLoader(samples(24), batch_size=6, collate_fn=collated)


class Opaque:
    """Nothing is known of it but what it is made of."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.inner, self.me, self.lock = {"x": x, "y": y}, self, threading.Lock()


class OfOpaque(Net):
    """What its step assigns to the batch, and asks of it, is seen by no other run of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert not batch.inner["x"].requires_grad
        batch.inner["x"].requires_grad_()
        batch.inner["x"] = batch.inner["x"] * 2
        return self.loss([batch.inner["x"], batch.inner["y"]])

    def train_dataloader(self) -> Any:
        return rows_in(Opaque)


class OtherOnEachRank(OfOpaque):
    def train_dataloader(self) -> Any:
        return rows_in(lambda x, y: Opaque(x + dist.get_rank(), y))


def refused() -> str:
    try:
        Bench({}).fit(OtherOnEachRank(), {"num_microbatches": 1})
    except ValueError as error:
        return str(error)
    return "nothing"


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Bench({}).fit(OfOpaque())
        Bench({}).fit(OfOpaque(), {"num_microbatches": 1})
    return [str(warning.message) for warning in seen if "micro-batch" in str(warning.message)]


def sayings() -> Any:
    return refused(), warned()


def test_what_is_said() -> None:
    (refusal, first), (other_refusal, second) = run_trainer_ranks(sayings, 2)
    assert refusal == other_refusal
    assert "different batches" in refusal
    assert "cannot pickle '_thread.lock' object" in refusal
    assert "seed_everything(seed, workers=True)" in refusal
    assert second == []
    assert len(first) == 1  # once, and not where one micro-batch was asked for
    assert "batch is a tests.strategies.test_pipeline_steps.Opaque, which cannot be cut" in first[0]
    assert "split_batch(batch, num_microbatches)" in first[0]


# ---- what ranks tell each other ----


class Hookless(LightningModule):
    """A hook of the user's would cost a collective of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net().net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Batches:
    """Notes the collectives of the fifth one's step; those of the first ones are compared."""

    def __init__(self) -> None:
        self.collectives: list[str] = []

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        for index in range(len(self)):
            if index == 4:
                profiler.start()
            if index == 5:
                profiler.stop()
                names = [event.name for event in profiler.events() if event.name.startswith("c10d::")]
                self.collectives = [name for name in names if name not in ("c10d::send", "c10d::recv_")]
            yield list(samples(8).tensors)


READING_NOTHING = LambdaCallback(on_train_batch_start=lambda *_: None, on_train_batch_end=lambda *_: None)


def collectives() -> list[list[str]]:
    found = []
    options: list[dict[str, Any]] = [{}, {"gradient_clip_val": 0.1}, {"callbacks": [READING_NOTHING]}]
    for each in options:
        batches = Batches()
        Bench({"num_microbatches": 2}).trainer(max_epochs=1, **each).fit(Hookless(), batches)
        found.append(batches.collectives)
    return found


def test_a_step_takes_one_collective_and_clipping_or_hooks_another() -> None:
    for plain, *others in run_trainer_ranks(collectives, 2):
        assert len(plain) == 1, plain
        assert [len(each) for each in others] == [2, 2], others
