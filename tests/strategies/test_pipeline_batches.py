"""Batches that are cut in another way than along their first dimension, or not at all: as in one process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.ranks import run_trainer_ranks
from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, name_of

pytestmark = pytest.mark.filterwarnings("ignore:smddp_pipeline runs batches as one micro-batch:UserWarning")
TIME, ROWS = 6, 4
WHOLE = {"num_microbatches": 1}  # what one process is told where no cut is clear

# ---- time first ----


class Series(Dataset[Any]):
    """Rows of ``TIME`` steps, and a label for each."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.data = torch.randn(12, length, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index], self.data[index, :, :3].cumsum(0).argmax(-1)


def time_first(rows: list[Any]) -> Any:
    return torch.stack([x for x, _ in rows], 1), torch.stack([y for _, y in rows], 1)


class Recurrent(Net):
    """Batches of the shape (time, rows, 8): a cut along time trains another model."""

    def __init__(self, length: int = TIME, batch_size: int | None = ROWS) -> None:
        super().__init__()
        self.length, self.size = length, batch_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.rnn = nn.GRU(8, 8)

    def loss(self, batch: Any) -> Tensor:
        hidden, _ = self.rnn(batch[0])
        return F.cross_entropy(self.net(hidden).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.rnn(batch[0])[0])

    def train_dataloader(self) -> Any:
        data = Series(self.length)
        if self.size is not None:
            return DataLoader(data, batch_size=self.size, collate_fn=time_first)
        batches = [time_first([data[row] for row in range(begin, begin + ROWS)]) for begin in (0, 4, 8)]
        return DataLoader(batches, batch_size=None)

    val_dataloader = predict_dataloader = train_dataloader


def time_by_loader(bench: Bench) -> Any:
    return bench.fit(Recurrent(), accumulation=WHOLE, max_epochs=1)


def time_as_long_as_rows(bench: Bench) -> Any:
    return bench.fit(Recurrent(length=ROWS), accumulation=WHOLE, max_epochs=1)


def time_without_batch_size(bench: Bench) -> Any:
    return bench.fit(Recurrent(batch_size=None), accumulation=WHOLE, max_epochs=1)


def time_with_the_number_of_rows(bench: Bench) -> Any:
    return bench.fit(Recurrent(length=ROWS), {"batch_size_fn": rows_of_second}, WHOLE, max_epochs=1)


def rows_of_second(batch: Any) -> int:
    return batch[0].shape[1]


def time_predicted(bench: Bench) -> Any:
    model = Recurrent(length=ROWS)
    predictions = bench.trainer(accumulation=WHOLE).predict(model)
    return predictions, bench.trainer(accumulation=WHOLE).validate(model, verbose=False)


class Attending(Recurrent):
    """Attention has no order: only the losses of parts show that the first dimension is no row."""

    def __init__(self) -> None:
        super().__init__(length=ROWS)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.attention = nn.MultiheadAttention(8, 2)

    def loss(self, batch: Any) -> Tensor:
        mixed, _ = self.attention(batch[0], batch[0], batch[0])
        return F.cross_entropy(self.net(4 * mixed).flatten(0, 1), batch[1].flatten())


def time_without_order(bench: Bench) -> Any:
    return bench.fit(Attending(), accumulation=WHOLE, max_epochs=1)


class ByHook(Recurrent):
    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        x, y = batch
        parts = zip(x.chunk(num_microbatches, 1), y.chunk(num_microbatches, 1), strict=True)
        return [(part, part[0].shape[1]) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch[0].shape[0] == TIME
        self.log("rows", float(batch[0].shape[1]), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def time_by_hook(bench: Bench) -> Any:
    return bench.fit(ByHook(), {"num_microbatches": 2}, max_epochs=1)


TIMES = [time_by_loader, time_as_long_as_rows, time_predicted, time_without_order, time_by_hook]
MORE_TIMES = [time_with_the_number_of_rows, time_without_batch_size]
TWO, MORE = Matrix(TIMES), Matrix(MORE_TIMES)


@pytest.mark.slow
@pytest.mark.parametrize("case", TIMES, ids=name_of)
def test_time_is_never_cut(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_TIMES, ids=name_of)
def test_time_is_never_cut_elsewhere(case: Case) -> None:
    MORE.compare(case)


# ---- objects ----


def rows_in(collate: Callable[[Tensor, Tensor], Any], count: int = 24, batch_size: int = 6) -> Any:
    data = samples(count)

    def collated(rows: list[Any]) -> Any:
        return collate(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    return DataLoader(data, batch_size=batch_size, collate_fn=collated)


class Graphs:
    """A batch of graphs of several nodes each, with the methods that libraries of graphs have."""

    def __init__(self, entries: list[tuple[Tensor, Tensor]]) -> None:
        self.x = torch.cat([x for x, _ in entries])
        self.y = torch.stack([y for _, y in entries])
        self.batch = torch.repeat_interleave(torch.tensor([len(x) for x, _ in entries]))
        self.me, self.lock = self, threading.Lock()

    def to_data_list(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.x[self.batch == graph], y) for graph, y in enumerate(self.y)]

    @classmethod
    def from_data_list(cls, entries: list[tuple[Tensor, Tensor]]) -> Graphs:
        return cls(entries)


class OfGraphs(Net):
    """Nodes are mixed into one row for each graph; the step assigns to the batch, as many do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch.x.shape[1] == 8
        assert not batch.x.requires_grad
        batch.x.requires_grad_()
        batch.x = batch.x.tanh().repeat(1, 2)
        pooled = torch.zeros(len(batch.y), 16).index_add(0, batch.batch, batch.x)
        self.log("graphs", float(len(batch.y)), reduce_fx="sum")
        return self.loss([pooled[:, :8], batch.y])

    def train_dataloader(self) -> Any:
        def collate(x: Tensor, y: Tensor) -> Graphs:
            return Graphs([(row.expand(1 + index % 3, -1), y[index]) for index, row in enumerate(x)])

        return rows_in(collate)


def graphs(bench: Bench) -> Any:
    model = OfGraphs()
    results = bench.fit(model, {"num_microbatches": 3}, max_epochs=1)
    return results, [len(batch.y) for batch in model.train_dataloader()]


class Opaque:
    """Nothing is known of it but what it is made of."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.inner, self.me, self.lock = {"x": x, "y": y}, self, threading.Lock()


class OfOpaque(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.inner["x"] = batch.inner["x"] * 2  # seen by no other run of the step
        self.seen = len(batch.inner["x"])
        return self.loss([batch.inner["x"], batch.inner["y"]])

    def train_dataloader(self) -> Any:
        return rows_in(Opaque, count=22)


def opaque(bench: Bench) -> Any:
    model = OfOpaque()
    return bench.fit(model, max_epochs=1), model.seen


def opaque_told(bench: Bench) -> Any:
    """``num_microbatches=1`` says that it is meant; no word about it."""
    return bench.fit(OfOpaque(), {"num_microbatches": 1}, max_epochs=1)


def cut_opaque(batch: Opaque, count: int) -> list[Opaque]:
    parts = zip(batch.inner["x"].tensor_split(count), batch.inner["y"].tensor_split(count), strict=True)
    return [Opaque(x, y) for x, y in parts if len(x)]


def opaque_cut_by_argument(bench: Bench) -> Any:
    model = OfOpaque()
    results = bench.fit(model, {"split_batch": sized_opaque, "num_microbatches": 2}, max_epochs=1)
    return results, model.seen


def sized_opaque(batch: Opaque, count: int) -> list[tuple[Opaque, int]]:
    return [(part, len(part.inner["y"])) for part in cut_opaque(batch, count)]


class Packed(Net):
    """A packed sequence, as collate functions for speech make it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths = nn.utils.rnn.pad_packed_sequence(batch["x"], batch_first=True)
        return self.loss([x.sum(1) / lengths[:, None], batch["y"]])

    def train_dataloader(self) -> Any:
        def collate(x: Tensor, y: Tensor) -> Any:
            rows = [row.expand(1 + index % 3, -1) for index, row in enumerate(x)]
            return {"x": nn.utils.rnn.pack_sequence(rows, enforce_sorted=False), "y": y}

        return rows_in(collate)


def packed(bench: Bench) -> Any:
    return bench.fit(Packed(), accumulation=WHOLE, max_epochs=1)


class Detection(Net):
    """Lists of images and of targets of any size; losses in a dict."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, targets = batch
        x = self.net[:2](torch.stack([image.mean((1, 2)) for image in images]))
        scores = self.net[2:](x)
        boxes = torch.cat([target["boxes"].mean(0)[None] for target in targets])
        losses = {
            "classes": F.cross_entropy(scores, torch.stack([target["label"] for target in targets])),
            "boxes": F.mse_loss(x[:, :4], boxes),
        }
        self.log_dict(losses)
        return sum(losses.values())

    def train_dataloader(self) -> Any:
        def collate(x: Tensor, y: Tensor) -> Any:
            images = tuple(row[:, None, None].expand(8, 3 + i % 2, 4) for i, row in enumerate(x))
            targets = tuple({"boxes": row[:4].expand(1 + i % 3, 4), "label": y[i]} for i, row in enumerate(x))
            return images, targets

        return rows_in(collate)


def detection(bench: Bench) -> Any:
    return bench.fit(Detection(), {"num_microbatches": 3}, {"split_batch": rows_of_both}, max_epochs=1)


def rows_of_both(batch: Any, count: int) -> list[Any]:
    (images, sizes), (targets, _) = (zip(*rows_of_list(entries, count), strict=True) for entries in batch)
    return list(zip(zip(images, targets, strict=True), sizes, strict=True))


def rows_of_list(entries: Any, count: int) -> list[Any]:
    """Pairs, as one process does not see the rows of a list of tensors."""
    parts = torch.arange(len(entries)).tensor_split(count)
    return [([entries[row] for row in part], len(part)) for part in parts if len(part)]


class TwoLoaders(Net):
    """Loaders of different batch sizes, as in anomaly detection."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["labelled"]) + self.net(batch["other"][0]).pow(2).mean()

    def train_dataloader(self) -> Any:
        return {
            "labelled": DataLoader(samples(24), batch_size=6),
            "other": DataLoader(samples(20), batch_size=5),
        }


def two_loaders(bench: Bench) -> Any:
    return bench.fit(TwoLoaders(), max_epochs=1)


class Rollouts(Net):
    """A list of steps, each a tuple, with another length each time, from a stream."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        states, values = torch.stack([s for s, _, _ in batch]), torch.stack([v for _, _, v in batch])
        actions = torch.tensor([action for _, action, _ in batch])
        chosen = self.net(states).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
        return -(chosen * values).mean()

    def train_dataloader(self) -> Any:
        data = [(x, int(y), x.sum()) for x, y in samples(24)]
        return DataLoader([data[:7], data[7:12], data[12:]], batch_size=None, collate_fn=same)


def same(value: Any) -> Any:
    return value


def rollouts(bench: Bench) -> Any:
    return bench.fit(Rollouts(), {"num_microbatches": 2}, {"split_batch": rows_of_list}, max_epochs=1)


class Flagged(Net):
    """Asks for gradients of its batch, as reentrant checkpoints need it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert not batch[0].requires_grad
        batch[0].requires_grad_()
        return super().training_step(batch, batch_idx)


def flagged(bench: Bench) -> Any:
    return bench.fit(Flagged(), max_epochs=1)


OBJECTS = [graphs, opaque, opaque_cut_by_argument, packed, detection, two_loaders, flagged]
MORE_OBJECTS = [opaque_told, rollouts]
OBJECTS_ON_TWO, MORE_ON_TWO = Matrix(OBJECTS), Matrix(MORE_OBJECTS)


@pytest.mark.slow
@pytest.mark.parametrize("case", OBJECTS, ids=name_of)
def test_batches_of_any_kind(case: Case) -> None:
    OBJECTS_ON_TWO.compare(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_OBJECTS, ids=name_of)
def test_batches_of_more_kinds(case: Case) -> None:
    MORE_ON_TWO.compare(case)


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
