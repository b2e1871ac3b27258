"""Batches: of any structure, cut as they can be; where ranks have other data, the first rank's batch counts."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.ranks import run_trainer_ranks
from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, name_of

pytestmark = pytest.mark.filterwarnings("ignore:smddp_pipeline runs batches as one micro-batch:UserWarning")
TIME = 8
WHOLE = {"num_microbatches": 1}  # what one process is told where no cut is clear


def rows_in(collate: Callable[[Tensor, Tensor], Any], count: int = 24, batch_size: int = 6) -> Any:
    def collated(rows: list[Any]) -> Any:
        return collate(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    return DataLoader(samples(count), batch_size=batch_size, collate_fn=collated)


# ---- time first ----


class Recurrent(Net):
    """Batches of the shape (time, rows, 8): a cut along time trains another model."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.rnn = nn.GRU(8, 8)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(self.rnn(batch[0])[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.rnn(batch[0])[0])

    def train_dataloader(self) -> Any:
        def collate(x: Tensor, y: Tensor) -> Any:
            scale = torch.linspace(0.5, 1, TIME)[:, None, None]
            return x * scale, y.expand(TIME, -1)

        return rows_in(collate)

    val_dataloader = predict_dataloader = train_dataloader


def time_first(bench: Bench) -> Any:
    model = Recurrent()
    return bench.fit(model, accumulation=WHOLE, max_epochs=1), bench.trainer(accumulation=WHOLE).predict(model)


# ---- structures and objects ----


class Dicts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch["tag"] == "train"
        assert len(batch["names"]) == len(batch["target"])
        self.names.extend(batch["names"])
        return self.loss([batch["input"]["x"], batch["target"]])

    def train_dataloader(self) -> Any:
        def collate(x: Tensor, y: Tensor) -> Any:
            names = [f"row {int(t)}" for t in y]
            return {"input": {"x": x}, "target": y, "names": names, "size": len(x), "tag": "train"}

        return rows_in(collate, count=17, batch_size=7)


def dicts(bench: Bench) -> Any:
    model = Dicts()
    return bench.fit(model, {"num_microbatches": 3}, max_epochs=1), model.names


class Combined(Net):
    """Two loaders at once."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])

    def train_dataloader(self) -> Any:
        first = DataLoader(samples(24), batch_size=6)
        return CombinedLoader({"a": first, "b": DataLoader(samples(12), batch_size=6)}, "max_size_cycle")


def combined(bench: Bench) -> Any:
    return bench.fit(Combined(), max_epochs=1)


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
        self.seen = len(batch.inner["x"])
        return self.loss([batch.inner["x"], batch.inner["y"]])

    def train_dataloader(self) -> Any:
        return rows_in(Opaque, count=22)


def opaque(bench: Bench) -> Any:
    model = OfOpaque()
    return bench.fit(model, max_epochs=1), model.seen


def opaque_cut_by_argument(bench: Bench) -> Any:
    model = OfOpaque()
    results = bench.fit(model, {"split_batch": sized_opaque, "num_microbatches": 2}, max_epochs=1)
    return results, model.seen


def sized_opaque(batch: Opaque, count: int) -> list[tuple[Opaque, int]]:
    parts = zip(batch.inner["x"].tensor_split(count), batch.inner["y"].tensor_split(count), strict=True)
    return [(Opaque(x, y), len(y)) for x, y in parts if len(y)]


# ---- data that differ between ranks ----


class Seeded(Net):
    """Each rank draws other random numbers from the first batch on."""

    def __init__(self) -> None:
        super().__init__(count=16)

    def on_fit_start(self) -> None:
        torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))


class Shuffled(Seeded):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.count), batch_size=self.batch_size, shuffle=True)


def shuffled(bench: Bench) -> Any:
    return bench.fit(Shuffled())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(21):
            x = torch.randn(8)
            yield x, x[:3].argmax()


class Streamed(Seeded):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=8)


def stream(bench: Bench) -> Any:
    return bench.fit(Streamed(), max_epochs=1)


class AugmentedLater(Evaluated):
    """In training, not in validation."""

    on_fit_start = Seeded.on_fit_start

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn_like(batch[0]) * self.trainer.training, batch[1]]


def augmented_after_transfer(bench: Bench) -> Any:
    return bench.fit(AugmentedLater(count=16), max_epochs=1)


CASES: list[Case] = [
    *(time_first, dicts, combined, opaque, opaque_cut_by_argument),
    *(shuffled, stream, augmented_after_transfer),
]
TWO = Matrix(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


# ---- what is said ----


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


class Checked(OfOpaque):
    findings = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.findings = len(self.trainer.strategy.findings)


def two_replicas() -> int:
    """Each has a micro-batch that cannot be sent: the first is checked."""
    model = Checked()
    Bench({"pipeline_parallel_size": 1}).fit(model, {"num_microbatches": 1})
    return model.findings


def sayings() -> Any:
    return refused(), warned(), two_replicas()


@pytest.mark.slow
def test_what_is_said() -> None:
    (refusal, first, findings), (other_refusal, second, others_findings) = run_trainer_ranks(sayings, 2)
    assert findings == others_findings > 1
    assert refusal == other_refusal
    assert "different batches" in refusal
    assert "cannot pickle '_thread.lock' object" in refusal
    assert "seed_everything(seed, workers=True)" in refusal
    assert second == []
    assert len(first) == 1  # once, and not where one micro-batch was asked for
    assert "batch is a tests.strategies.test_pipeline_batches.Opaque, which cannot be cut" in first[0]
    assert "split_batch(batch, num_microbatches)" in first[0]
