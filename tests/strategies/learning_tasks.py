"""Small modules of the kinds that users have, with all four steps: segmentation, speech, memory banks and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Net, outcome

ROWS, BATCH = 10, 6


class Task(Net):
    """Subclasses have layers, rows of data, a loss, and what is predicted."""

    epochs = 1
    accumulation: Mapping[str, Any] = {}  # what one process is told of micro-batches, and a pipeline finds out

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.outputs: list[Any] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.build()

    def build(self) -> None:
        raise NotImplementedError

    def data(self) -> list[Any]:
        return list(samples(ROWS))

    def collate(self, rows: list[Any]) -> Any:
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=BATCH)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=BATCH)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.outputs.append(outputs)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), batch_size=BATCH)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data(), batch_size=BATCH, collate_fn=self.collate)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def all_steps(bench: Bench, model: Task, pipeline: Any = None) -> Any:
    """What training, validation, test and prediction give."""
    trainer = bench.trainer(pipeline, model.accumulation, max_epochs=model.epochs, num_sanity_val_steps=0)
    trainer.fit(model)
    result = outcome(model, trainer, outputs=list(model.outputs))
    return result, trainer.test(model, verbose=False), _predicted(bench, trainer, model)


def _predicted(bench: Bench, trainer: Trainer, model: Task) -> Any:
    """Whole batches' where those of micro-batches cannot be put together: a pipeline then runs whole ones itself."""
    try:
        return trainer.predict(model)
    except ValueError as error:
        if bench.accumulation is None or "for micro-batches of" not in str(error):
            raise
        return Bench().trainer().predict(model)


class Segmentation(Task):
    """An encoder and a decoder with a skip connection; pixels of 255 do not count, and rows have more or fewer."""

    def build(self) -> None:
        self.first, self.down, self.middle = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 2, 2), nn.Conv2d(6, 6, 1)
        self.up, self.head = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 4, 1)

    def data(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(ROWS, 3, 4, 4, generator=generator)
        labels = torch.randint(4, (ROWS, 4, 4), generator=generator)
        share = torch.linspace(0, 0.9, ROWS)[:, None, None]
        labels[torch.rand(labels.shape, generator=generator) < share] = 255
        return list(zip(images, labels, strict=True))

    def forward(self, images: Tensor) -> Tensor:
        skipped = self.first(images).relu()
        inner = self.middle(self.down(skipped).relu()).relu()
        return self.head(torch.cat([skipped, self.up(inner)], 1))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=255)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits, counts = self(batch[0]), batch[1] != 255
        found = logits.argmax(1)
        both = ((found == 1) & (batch[1] == 1)).sum()
        either = (((found == 1) | (batch[1] == 1)) & counts).sum()
        self.log("iou", both / either.clamp(min=1))  # of the batch: no mean over rows
        self.log("val_loss", F.cross_entropy(logits, batch[1], ignore_index=255))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1).to(torch.uint8)


class PackedInside(Task):
    """Rows of any length, packed in the step; what is predicted is as long as the longest row of the batch."""

    def build(self) -> None:
        self.first, self.rnn, self.head = nn.Linear(4, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)

    def data(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        return [(torch.randn(1 + row % 5, 4, generator=generator), torch.tensor(row % 3)) for row in range(ROWS)]

    def collate(self, rows: list[Any]) -> Any:
        lengths = torch.tensor([len(x) for x, _ in rows])
        return pad_sequence([x for x, _ in rows], batch_first=True), lengths, torch.stack([y for _, y in rows])

    def run(self, batch: Any) -> Any:
        packed = pack_padded_sequence(self.first(batch[0]), batch[1], batch_first=True, enforce_sorted=False)
        return self.rnn(packed)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.run(batch)[1][-1]), batch[2])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(pad_packed_sequence(self.run(batch)[0], batch_first=True)[0])


class Speech(Task):
    """CTC: time first in the loss and in what is returned, lengths of inputs and of targets."""

    def build(self) -> None:
        self.first, self.second, self.head = nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(6, 6, 1), nn.Linear(6, 5)

    def data(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        rows = []
        for row in range(ROWS):
            labels = torch.randint(1, 5, (1 + row % 3,), generator=generator)
            rows.append((torch.randn(8 + row % 4, 4, generator=generator), labels))
        return rows

    def collate(self, rows: list[Any]) -> Any:
        return {
            "x": pad_sequence([x for x, _ in rows], batch_first=True),
            "y": pad_sequence([y for _, y in rows], batch_first=True),
            "input_lengths": torch.tensor([len(x) for x, _ in rows]),
            "target_lengths": torch.tensor([len(y) for _, y in rows]),
        }

    def chances(self, batch: Any) -> Tensor:
        inner = self.second(self.first(batch["x"].transpose(1, 2)).relu()).relu()
        return self.head(inner.transpose(1, 2)).log_softmax(-1).transpose(0, 1)

    def loss(self, batch: Any) -> Tensor:
        return F.ctc_loss(self.chances(batch), batch["y"], batch["input_lengths"], batch["target_lengths"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        chances = self.chances(batch)
        self.log("highest", chances.max())
        return {"chances": chances, "ids": batch["target_lengths"].tolist()}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.chances(batch)


class MemoryBank(Task):
    """Anomaly detection: training collects features for the distances of later rows; its loss trains nothing."""

    epochs = 2

    def build(self) -> None:
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)
        self.requires_grad_(False)
        self.kept: list[Tensor] = []
        self.bank = torch.zeros(1, 4)

    def features(self, batch: Any) -> Tensor:
        return self.second(self.first(batch[0]).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(self.features(batch))
        return torch.zeros((), requires_grad=True)

    def on_validation_epoch_start(self) -> None:
        if self.kept:
            self.bank = torch.cat(self.kept)

    def loss(self, batch: Any) -> Tensor:
        return torch.cdist(self.features(batch), self.bank).amin(1).max()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.cdist(self.features(batch), self.bank).amin(1)

    def configure_optimizers(self) -> None:
        return None


class Normalised(Task):
    """BatchNorm: in training each row's output depends on the others, so that small batches are not cut."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        self.accumulation = {"num_microbatches": self.parts}

    def parts(self, rows: int) -> int:
        return 1 if self.net[1].training else rows

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class Unfreezing(Normalised):
    """Its BatchNorm is in evaluation mode in the first epoch."""

    epochs = 2

    def on_train_epoch_start(self) -> None:
        self.net[1].train(self.current_epoch > 0)


class Deviating(Normalised):
    """Logs and returns what rows make together: of some it can be made of parts' values, of others not."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.log_dict({"perplexity": loss.exp(), "norm": out.norm(), "rms": out.square().mean().sqrt()})
        found = out.argmax(1) - (100 if batch_idx == 0 else 0)  # so that the first batch does not tell
        hits = ((found == 1) & (batch[1] == 1)).sum()
        self.log("f1", 2 * hits / ((found == 1).sum() + (batch[1] == 1).sum()).clamp(min=1))
        return {"out": out, "centred": out.detach().mean(1)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        self.log("deviation", out.std())
        self.log("range", out.max() - out.min())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        return {"out": out.T, "centred": out - out.mean(0)}


class DeviatingInTraining(Deviating):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        self.log("train_deviation", out.std())
        return F.cross_entropy(out, batch[1])


class TimeFirst(Task):
    """Batches have time first, and are cut by the module's own method."""

    def build(self) -> None:
        self.rnn, self.head = nn.GRU(8, 6), nn.Linear(6, 3)
        self.accumulation = {"num_microbatches": BATCH}

    def collate(self, rows: list[Any]) -> Any:
        return torch.stack([x.expand(4, -1) for x, _ in rows], 1), torch.stack([y for _, y in rows])

    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        parts = zip(batch[0].tensor_split(num_microbatches, 1), batch[1].tensor_split(num_microbatches), strict=True)
        return [((x, y), len(y)) for x, y in parts if len(y)]

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.rnn(batch[0])[0][-1]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"out": self.predict_step(batch, batch_idx).transpose(0, 1)}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.rnn(batch[0])[0])


class Generators(Normalised):
    """A batch that can be run through once."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        self.accumulation = {"num_microbatches": BATCH, "split_batch": self.parts_of}

    def parts_of(self, batch: Any, num_microbatches: int) -> list[Any]:
        return [([row], 1) for row in batch]

    def collate(self, rows: list[Any]) -> Any:
        return (row for row in rows)

    def stacked(self, batch: Any) -> Any:
        return tuple(torch.stack(column) for column in zip(*batch, strict=True))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(self.stacked(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.stacked(batch)[0])


class NestedRows(Generators):
    """Rows of any length in a nested tensor, which is not cut."""

    def parts_of(self, batch: Any, num_microbatches: int) -> list[Any]:
        return [(batch, len(batch[1]))]

    def collate(self, rows: list[Any]) -> Any:
        nested = torch.nested.nested_tensor(
            [x.expand(1 + index % 3, -1) for index, (x, _) in enumerate(rows)], layout=torch.jagged
        )
        return nested, torch.stack([y for _, y in rows])

    def stacked(self, batch: Any) -> Any:
        return torch.stack([x.mean(0) for x in batch[0].unbind()]), batch[1]


TASKS: list[type[Task]] = [
    Segmentation,
    PackedInside,
    Speech,
    MemoryBank,
    Normalised,
    Unfreezing,
    Deviating,
    DeviatingInTraining,
    TimeFirst,
    Generators,
    NestedRows,
]
