"""Validation, test and prediction steps that cannot be cut into stages run all the same, in lockstep."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from tests.strategies.learners import CLASSES
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, name_of

LOCKSTEP = "runs in lockstep"


class Texts(Net):
    """Language models, which generate in validation and prediction."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = GPT2LMHeadModel(
                GPT2Config(
                    **{"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 23, "n_positions": 32},
                    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
                    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
                )
            )
        self.texts: list[Any] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        texts = self.model.generate(batch[:, :3], max_new_tokens=3, do_sample=False)
        self.texts.append(texts)
        self.log("length", float(texts.shape[1]))
        self.log("sum", texts.sum().float())
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model.generate(batch[:, :3], max_new_tokens=2, num_beams=2)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(torch.randint(3, 23, (8, 8), generator=generator), batch_size=4)

    val_dataloader = predict_dataloader = train_dataloader


class Samples(Net):
    """Draws tokens one after the other, and measures them with metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.seen = torchmetrics.CatMetric()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, target = batch
        torch.manual_seed(batch_idx)
        for _ in range(3):
            probabilities = self.net(x).softmax(1)
            drawn = torch.multinomial(probabilities, 1)
            if drawn.float().mean() > 4:
                x = x * 0.5
            x = x + 0.1 * drawn
        self.accuracy(probabilities, target)
        self.seen.update(drawn.float())
        self.log("accuracy", self.accuracy)
        self.log("drawn", drawn.float().mean())
        return {"drawn": drawn}

    def on_validation_epoch_end(self) -> None:
        self.log("all", self.seen.compute().sum())
        self.seen.reset()

    val_dataloader = Evaluated.val_dataloader


class InputGradient(Net):
    """Takes a gradient in the step; counts, in a dict and in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"rows": 0}
        self.net[1].calls = 0

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.counts["rows"] += len(batch[0])
        self.net[1].calls += 1
        with torch.inference_mode(False), torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.net(x).logsumexp(1).sum(), x)
        self.log("saliency", gradient.abs().mean())

    def on_validation_epoch_end(self) -> None:
        self.losses += [self.counts["rows"], self.net[1].calls]

    val_dataloader = Evaluated.val_dataloader


class AsOne(torch.autograd.Function):
    """A whole model within one function, as reversible layers have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        return model(x)


class OfOneFunction(Evaluated):
    """The first stage's layers within one function: another stage fails at them, while the first one goes on."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self.net[2:](AsOne.apply(batch[0], self.net[:2]))
        self.log("val_loss", torch.nn.functional.cross_entropy(out, batch[1]))


MODULES = {cls.__name__: cls for cls in (Texts, Samples, InputGradient, OfOneFunction)}


def fit(bench: Bench, module: str) -> Any:
    model = MODULES[module]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_predict_batches": 1}
        epochs = 2 if isinstance(model, Samples) else 1
        result = bench.fit(model, max_epochs=epochs, inference_mode=module != "InputGradient", **options)
        trainer = model.trainer
        result["texts"] = getattr(model, "texts", [])
        if module == "Texts":
            result["predicted"] = trainer.predict(model)
    said = [str(w.message) for w in caught if LOCKSTEP in str(w.message)]
    if bench.pipeline is not None and trainer.global_rank == 0:
        assert said
    return result


CASES: list[Case] = [functools.partial(fit, module=name) for name in MODULES]
# Whole batches are run in lockstep, and losses are means over rows.
TWO = Matrix(CASES, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_as_in_one_process(case: Case) -> None:
    TWO.compare(case)
