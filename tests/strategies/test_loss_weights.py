"""Losses that are no means over rows: a language model with padding, sums, what evaluation hides."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError
from transformers import GPT2Config, GPT2LMHeadModel

from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Matrix

ROWS, LENGTH, VOCABULARY, WIDTH = 16, 12, 32, 16
PAD = 0


def rows() -> list[dict[str, Tensor]]:
    """As tokenizers and collators make them: padded on the right, with labels of -100 where nothing counts."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(ROWS):
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        attention = (torch.arange(LENGTH) < LENGTH - (5 * index) % (LENGTH - 3)).long()
        tokens = torch.where(attention == 1, tokens, PAD)
        labels = torch.where(attention == 1, tokens, -100)
        found.append({"input_ids": tokens, "attention_mask": attention, "labels": labels})
    return found


class Padded(LightningModule):
    """Some layers; subclasses have the loss, and what it is a mean over."""

    loss_weight: Any = staticmethod(lambda batch: (batch["input_ids"][:, 1:] != PAD).sum())

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.build()
        self.losses: list[float] = []

    def build(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The padding token is the label that does not count."""
        tokens = batch["input_ids"]
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=8)  # type: ignore[arg-type]


class Gpt2(Padded):
    """As recipes have it: the model computes its loss."""

    loss_weight = "auto"

    def build(self) -> None:
        sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


class NoLossInEvaluation(Padded):
    """As detection models: in evaluation mode there are predictions only."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if not self.training:
            return {"predictions": self(batch["input_ids"])}["loss"]
        return super().loss(batch)


class MetricLoss(Padded):
    """A torchmetrics object is the loss."""

    loss_weight = "auto"

    def build(self) -> None:
        super().build()
        self.criterion = MeanSquaredError()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.criterion(self(batch["input_ids"])[:, :, 0], batch["attention_mask"].float())


class TwoSizes(Padded):
    """A batch with as many tensors of one first dimension as of another."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def train_dataloader(self) -> Any:
        def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            return {"input_ids": torch.stack([row["input_ids"] for row in rows]), "table": torch.ones(6, 2)}

        return DataLoader(rows(), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


class MadeLate(Padded):
    """Its layers have no memory before the sanity check, by whose step they are placed."""

    def build(self) -> None:
        self.head = None

    def configure_model(self) -> None:
        if self.head is None:
            super().build()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    val_dataloader = Padded.train_dataloader


def fit(bench: Bench, model: type[Padded]) -> Any:
    """What was trained; any warning is an error."""
    pipeline: dict[str, Any] = {"loss_weight": model.loss_weight}
    if model is TwoSizes:
        pipeline["batch_size_fn"] = lambda batch: len(batch["input_ids"])
    found = {"loss_weight": "shifted_labels"} if model is Gpt2 else None  # which the pipeline has to find
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*(does not have many workers|logging interval).*")
        return bench.fit(model(), pipeline, found, max_epochs=1)


CASES = [functools.partial(fit, model=model) for model in (Gpt2, NoLossInEvaluation, MetricLoss, TwoSizes)]
TWO = Matrix(CASES, pipeline={"num_microbatches": 4}, timeout=240.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.keywords["model"].__name__)
def test_a_loss_is_weighted_by_what_it_is_a_mean_over(case: Any) -> None:
    TWO.compare(case)


def found_after_sanity_check() -> str:
    bench = Bench({"num_microbatches": 4, "meta_init": True})
    trainer = bench.trainer(max_epochs=1, num_sanity_val_steps=1, limit_val_batches=1)
    trainer.fit(MadeLate())
    return trainer.strategy.chosen_loss_weight


def test_the_weight_is_found_where_a_sanity_check_has_placed_the_module() -> None:
    assert run_trainer_ranks(found_after_sanity_check, 2) == ["sum", "sum"]
