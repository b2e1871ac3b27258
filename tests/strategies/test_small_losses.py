"""Small parts of losses that need other weights than the rest: they show in what is learned, not in the loss."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from tests.strategies.pipeline_learners import Bench, Case, Matrix
from tests.strategies.test_loss_weights import PAD, VOCABULARY, WIDTH, Small, rows_of


class Penalised(Small):
    """A mean over labels, and beside it one over all activations."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embedding(batch["input_ids"])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).transpose(1, 2), batch["labels"]) + 1e-3 * x.pow(2).mean()


class Spread(Small):
    """A mean over rows, and beside it how far rows are from each other."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self(batch["input_ids"])
        return F.cross_entropy(out.transpose(1, 2), batch["input_ids"]) - 1e-2 * out.mean((1, 2)).std()


class PenalisedInTraining(Penalised):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.training:
            return super().loss(batch)
        return F.cross_entropy(self(batch["input_ids"]).transpose(1, 2), batch["labels"])


class Experts(LightningModule):
    """Its model adds a balance of experts over all tokens of a batch to a mean over labels."""

    balanced = True

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = MixtralForCausalLM(
                MixtralConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=WIDTH,
                    intermediate_size=2 * WIDTH,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    num_local_experts=4,
                    pad_token_id=PAD,
                    output_router_logits=self.balanced,
                    router_aux_loss_coef=0.02,
                )
            )
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> Any:
        return DataLoader(rows_of("right", masked=False), batch_size=8)


class PaddedLater(Penalised):
    """All labels of the first batch count."""

    def train_dataloader(self) -> Any:
        return DataLoader([*rows_of("none", masked=False)[:8], *rows_of("right", masked=False)], batch_size=8)


def told_later(bench: Bench) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bench.fit(PaddedLater(), max_epochs=2)
    said = [str(warning.message) for warning in caught if "halves" in str(warning.message)]
    first = bench.pipeline is not None and dist.get_rank() == 0
    assert ["is unlike their rows for the first time" in text for text in said] == [True] * first, said
    return result


class UnbalancedExperts(Experts):
    balanced = False


def told(bench: Bench, model: type[LightningModule], expected: bool = True) -> Any:
    """What was trained; a warning says on the first rank that there is one micro-batch, or there is no warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bench.fit(model(), max_epochs=1)
    said = [str(warning.message) for warning in caught if "halves" in str(warning.message)]
    first = bench.pipeline is not None and dist.get_rank() == 0
    assert ["but its gradient is not" in text for text in said] == [True] * (first and expected), said
    return result


FOUND = [functools.partial(told, model=model) for model in (Spread, PenalisedInTraining, Experts)]
MORE = [functools.partial(told, model=Penalised), functools.partial(told, model=UnbalancedExperts, expected=False)]
TWO_RANKS, MORE_ON_TWO_RANKS = Matrix([*FOUND, told_later], timeout=240.0), Matrix(MORE, timeout=240.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUND, ids=lambda case: case.keywords["model"].__name__)
def test_equals_one_process(case: Case) -> None:
    TWO_RANKS.compare(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.keywords["model"].__name__)
def test_more_equal_one_process(case: Case) -> None:
    MORE_ON_TWO_RANKS.compare(case)


@pytest.mark.slow
def test_a_first_batch_without_padding() -> None:
    TWO_RANKS.compare(told_later)
