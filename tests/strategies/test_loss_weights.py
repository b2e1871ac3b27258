"""Losses that are no means over rows, against accumulation: language models with padding, sums, masks, weights."""

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
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Matrix, name_of

ROWS, LENGTH, VOCABULARY, WIDTH = 16, 12, 32, 16
PAD = 0


def causal_gpt2() -> nn.Module:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, pad_token_id=PAD)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def causal_llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=PAD,
        )
    )


def masked_bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=2 * WIDTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def seq2seq_t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
        )
    )


MODELS = {"gpt2": causal_gpt2, "llama": causal_llama, "bert": masked_bert, "t5": seq2seq_t5}


def rows_of(padding: str, masked: bool) -> list[dict[str, Tensor]]:
    """Rows as tokenizers and collators make them: padded on one side, or full; labels of -100 where nothing counts."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(ROWS):
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        attention, positions = torch.ones(LENGTH, dtype=torch.int64), torch.arange(LENGTH)
        missing = (5 * index) % (LENGTH - 3)
        if padding == "right":
            attention[LENGTH - missing :] = 0
        elif padding == "left":
            attention[:missing] = 0
        tokens = torch.where(attention == 1, tokens, PAD)
        labels = torch.where(attention == 1, tokens, -100)
        if padding == "packed":  # two documents in a row; the first label of the second is predicted by nothing
            labels[4 + index % 3] = -100
        if masked:
            labels = torch.where(torch.rand(LENGTH, generator=generator) < 0.3, labels, -100)
            labels[index % 3] = tokens[index % 3]
        rows.append({"input_ids": tokens, "attention_mask": attention, "labels": labels})
        if padding == "left":
            rows[-1]["position_ids"] = (positions - missing).clamp(min=0)
    return rows


class LanguageModel(LightningModule):
    """As recipes have it: the model computes its loss."""

    def __init__(self, kind: str, padding: str) -> None:
        super().__init__()
        self.kind, self.padding = kind, padding
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = MODELS[kind]()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> Any:
        rows = rows_of(self.padding, self.kind == "bert")
        if self.kind in ("bert", "t5"):
            for row in rows:
                row.pop("position_ids", None)
        return DataLoader(rows, batch_size=8)


def language_model(bench: Bench, kind: str, padding: str) -> Any:
    """The pipeline has to find out what one process is told."""
    weight = "labels" if kind in ("bert", "t5") else "shifted_labels"
    return fit_quietly(bench, LanguageModel(kind, padding), accumulation={"loss_weight": weight})


def fit_quietly(bench: Bench, model: LightningModule, pipeline: Any = None, accumulation: Any = None) -> Any:
    """What was trained; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*(does not have many workers|logging interval).*")
        return bench.fit(model, pipeline, accumulation, max_epochs=1)


LANGUAGE_MODEL, *MORE_LANGUAGE_MODELS = [
    functools.partial(language_model, kind=kind, padding=padding)
    for kind, padding in (
        ("gpt2", "right"),
        ("t5", "right"), ("llama", "left"), ("bert", "right"), ("gpt2", "packed"), ("gpt2", "left"),
        ("llama", "right"), ("llama", "full"),
    )
]  # fmt: skip


class Small(LightningModule):
    """Some layers; subclasses have the loss, and what it is a mean over."""

    loss_weight: Any = "auto"

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        rows = rows_of("right", masked=False)
        for index, row in enumerate(rows):
            row["mask"], row["class"] = row["attention_mask"].float(), row["input_ids"][0].clone()
            row["class"][...] = torch.where(torch.tensor(index % 8 in (0, 5)), -100, row["class"])
            row["weight"] = torch.tensor(0.5 + index % 3)
        return DataLoader(rows, batch_size=8)


class OwnPadding(Small):
    """The padding token is the label that does not count."""

    loss_weight = staticmethod(lambda batch: (batch["input_ids"][:, 1:] != PAD).sum())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)


class ClassWeights(Small):
    loss_weight = staticmethod(
        lambda batch: torch.linspace(0.2, 3.0, VOCABULARY)[batch["labels"][batch["labels"] >= 0]].sum()
    )

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(torch.linspace(0.2, 3.0, VOCABULARY))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.criterion(self(batch["input_ids"]).transpose(1, 2), batch["labels"])


class Classes(Small):
    """One label for each row, of which some do not count."""

    loss_weight = staticmethod(lambda batch: (batch["class"] != -100).sum())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).mean(1), batch["class"])


class LateClasses(Classes):
    """The first batch has no label that does not count."""

    def train_dataloader(self) -> Any:
        rows = list(super().train_dataloader().dataset)
        for row in rows[:8]:
            row["class"] = row["input_ids"][0].clone()
        return DataLoader(rows, batch_size=8)


class Sum(Small):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["input_ids"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / 50


class MadeLate(Sum):
    """Its layers have no memory before the sanity check, by whose step they are placed."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.head = None
        self.losses = []

    def configure_model(self) -> None:
        if self.head is None:
            self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Masked(Small):
    loss_weight = "mask"

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(self(batch["input_ids"]).transpose(1, 2), batch["input_ids"], reduction="none")
        return (losses * batch["mask"]).sum() / batch["mask"].sum()


class MaskedShifted(Small):
    loss_weight = staticmethod(lambda batch: batch["mask"][:, 1:].sum())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["input_ids"])[:, :-1].transpose(1, 2)
        losses = F.cross_entropy(logits, batch["input_ids"][:, 1:], reduction="none")
        mask = batch["mask"][:, 1:]
        return (losses * mask).sum() / mask.sum()


class RowWeights(Small):
    loss_weight = "weight"

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = self(batch["input_ids"]).pow(2).mean((1, 2))
        return (losses * batch["weight"]).sum() / batch["weight"].sum()


class NoLossInEvaluation(OwnPadding):
    """As detection models: in evaluation mode there are predictions only."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if not self.training:
            return {"predictions": self(batch["input_ids"])}["loss"]
        return super().loss(batch)


class TokenAccuracy(OwnPadding):
    """What else is a mean over the labels that count."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        right = (self(tokens[:, :-1]).argmax(2) == tokens[:, 1:]) | (tokens[:, 1:] > 16)
        counted = tokens[:, 1:] != PAD
        self.log("accuracy", (right & counted).sum() / counted.sum(), on_step=False, on_epoch=True)
        return super().loss(batch)


class MetricLoss(Small):
    """A torchmetrics object is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = MeanSquaredError()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self(batch["input_ids"])[:, :, 0]
        return self.criterion(out, batch["mask"])


class TwoSizes(OwnPadding):
    """A batch with as many tensors of one first dimension as of another."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def train_dataloader(self) -> Any:
        def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            return {"input_ids": torch.stack([row["input_ids"] for row in rows]), "table": torch.ones(6, 2)}

        return DataLoader(super().train_dataloader().dataset, batch_size=8, collate_fn=collate)


def small(bench: Bench, model: type[Small]) -> Any:
    found = {"loss_weight": "sum"} if model is Sum else None  # where the pipeline has to find it
    return fit_quietly(bench, model(), {"loss_weight": model.loss_weight}, found)


def batch_size_fn(bench: Bench) -> Any:
    pipeline = {"batch_size_fn": lambda batch: len(batch["input_ids"]), "loss_weight": TwoSizes.loss_weight}
    return fit_quietly(bench, TwoSizes(), pipeline)


SMALL, MORE = (
    [functools.partial(small, model=model) for model in models]
    for models in (
        [ClassWeights, LateClasses, NoLossInEvaluation, MetricLoss],
        [OwnPadding, Classes, Masked, RowWeights, Sum, MaskedShifted, TokenAccuracy],
    )
)
TWO = Matrix([LANGUAGE_MODEL, *SMALL, batch_size_fn], pipeline={"num_microbatches": 4}, timeout=240.0)
MORE_ON_TWO = Matrix([*MORE_LANGUAGE_MODELS, *MORE], pipeline={"num_microbatches": 4}, timeout=240.0)


@pytest.mark.slow
def test_the_weight_of_a_language_model_is_found() -> None:
    TWO.compare(LANGUAGE_MODEL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_LANGUAGE_MODELS, ids=name_of)
def test_more_language_models(case: Any) -> None:
    MORE_ON_TWO.compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.keywords["model"].__name__)
def test_a_loss_is_weighted_by_what_it_is_a_mean_over(case: Any) -> None:
    TWO.compare(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.keywords["model"].__name__)
def test_more_losses(case: Any) -> None:
    MORE_ON_TWO.compare(case)


@pytest.mark.slow
def test_batch_size_fn_says_the_rows() -> None:
    TWO.compare(batch_size_fn)


def found_after_sanity_check() -> str:
    bench = Bench({"num_microbatches": 4, "meta_init": True})
    trainer = bench.trainer(max_epochs=1, num_sanity_val_steps=1, limit_val_batches=1)
    trainer.fit(MadeLate())
    return trainer.strategy.chosen_loss_weight


def test_the_weight_is_found_where_a_sanity_check_has_placed_the_module() -> None:
    assert run_trainer_ranks(found_after_sanity_check, 2) == ["sum", "sum"]
