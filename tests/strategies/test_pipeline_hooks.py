"""Hooks in Lightning's order and with whole parameters, loggers, writers, evaluation in lockstep: as in one process."""

from __future__ import annotations

import csv
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    LambdaCallback,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.core import hooks as of_modules
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, name_of, outcome

HOOKS = sorted(
    name
    for name in dir(Callback)
    if not name.startswith("_") and name not in ("state_key", "state_dict", "load_state_dict")
)


class Listener(Callback):
    """Writes down every hook, with what it can see of the batch and the outputs."""

    def __init__(self, calls: list[Any]) -> None:
        for name in HOOKS:
            setattr(self, name, functools.partial(self.note, calls, name))

    @staticmethod
    def note(calls: list[Any], name: str, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        seen = [args[0]["loss"].item()] if name == "on_train_batch_end" else []
        calls.append((f"callback.{name}", trainer.global_step, module.training, *seen))


MODULE_HOOKS = [
    *(name for base in (of_modules.ModelHooks, of_modules.DataHooks, of_modules.CheckpointHooks) for name in vars(base)
      if name.startswith("on_")),
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping"),
    *("configure_model", "configure_optimizers", "configure_callbacks", "prepare_data", "setup", "teardown"),
    "transfer_batch_to_device",
]  # fmt: skip


class Heard(Evaluated):
    """All hooks of a LightningModule, each with its usual behaviour."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


def hooks(bench: Bench) -> Any:
    calls: list[Any] = []

    def hearing(name: str) -> Any:
        base = getattr(Heard, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return base(self, *args, **kwargs)

        return functools.wraps(base)(hook)

    model = type("Heard", (Heard,), {name: hearing(name) for name in MODULE_HOOKS})()
    trainer = bench.trainer(callbacks=[Listener(calls)], accumulate_grad_batches=2, gradient_clip_val=1.0)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    trainer.predict(model)
    return calls, outcome(model, trainer)


class SeveralLoaders(Evaluated):
    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("loss_of_two", loss)
        if dataloader_idx == 1:
            self.log("second_only", loss * 2, add_dataloader_idx=False)
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(batch[0])[:, dataloader_idx]

    def val_dataloader(self) -> Any:
        return [DataLoader(samples(13), batch_size=5), DataLoader(samples(9), batch_size=4)]

    predict_dataloader = val_dataloader


def several_loaders(bench: Bench) -> Any:
    model = SeveralLoaders(count=16)
    trainer = bench.trainer()
    before = trainer.predict(model)
    trainer.fit(model)
    return before, trainer.validate(model, verbose=False), trainer.predict(model), outcome(model, trainer)


# ---- hooks that use parameters ----


class Consolidated(Evaluated):
    """Elastic weight consolidation: buffers that a hook fills, of weights on all stages, and that the step reads."""

    def __init__(self) -> None:
        super().__init__()
        for name, p in self.net.named_parameters():
            self.register_buffer(f"fisher_{name}".replace(".", "_"), torch.zeros_like(p))
            self.register_buffer(f"old_{name}".replace(".", "_"), torch.zeros_like(p))
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch: list[Tensor]) -> Tensor:
        pairs = [(name.replace(".", "_"), p) for name, p in self.net.named_parameters()]
        terms = [getattr(self, f"fisher_{n}") * (p - getattr(self, f"old_{n}")) ** 2 for n, p in pairs]
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1]) + 10 * sum(t.sum() for t in terms)

    def on_train_epoch_end(self) -> None:
        inputs, labels = next(iter(self.train_dataloader()))
        with torch.enable_grad():
            gradients = torch.autograd.grad(F.cross_entropy(self.net(inputs), labels), list(self.net.parameters()))
        for (name, p), gradient in zip(self.net.named_parameters(), gradients, strict=True):
            getattr(self, f"fisher_{name}".replace(".", "_")).add_(gradient**2)
            getattr(self, f"old_{name}".replace(".", "_")).copy_(p.detach())

    def on_validation_batch_start(self, *args: Any) -> None:
        self.scale.mul_(1 + 0.01 * self.net[0].weight.norm())


def of_hooks(bench: Bench) -> Any:
    return bench.fit(Consolidated(), limit_train_batches=3, limit_val_batches=2)


def stochastic_weight_averaging(bench: Bench) -> Any:
    return bench.fit(Evaluated(), callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)], max_epochs=3)


def callbacks_of_one_key(bench: Bench) -> Any:
    norms: list[float] = []

    def note(trainer: Any, module: Any) -> None:
        norms.append(float(sum(p.grad.norm() for p in module.parameters())))

    callbacks = [LambdaCallback(on_train_end=lambda *_: None), LambdaCallback(on_after_backward=note)]
    return bench.fit(Evaluated(), callbacks=callbacks, max_epochs=1, profiler="simple"), norms


# ---- what users look at ----


def loggers(bench: Bench) -> Any:
    found = [CSVLogger(bench.directory, "csv", version=0), TensorBoardLogger(bench.directory, "tensorboard", version=0)]
    callbacks = [LearningRateMonitor("step")]
    trainer = bench.trainer(logger=found, callbacks=callbacks, log_every_n_steps=2, enable_model_summary=True)
    model = Evaluated()
    trainer.fit(model)
    trainer.test(model, verbose=False)
    for logger in found:
        logger.finalize("success")
    torch.distributed.barrier() if torch.distributed.is_initialized() else None
    with open(Path(bench.directory, "csv", "version_0", "metrics.csv")) as file:
        return [
            {name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)
        ], trainer.log_dir.removeprefix(bench.directory)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.seen: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, rows: Any, *rest: Any) -> None:
        self.seen.append((prediction, None if rows is None else list(rows)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, rows: Any) -> None:
        self.seen.append((predictions, rows))


def predictions(bench: Bench) -> Any:
    writer = Writer()
    trainer = bench.trainer(callbacks=[writer])
    return trainer.predict(Evaluated(), DataLoader(samples(20), batch_size=8)), writer.seen


# ---- evaluation in lockstep: of whole batches ----


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


class AsOne(torch.autograd.Function):
    """A whole model within one function, as reversible layers have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        return model(x)


class Noise(nn.Module):
    """Draws in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Draws(Evaluated):
    """A layer within a function draws, and the step behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self.net[2:](AsOne.apply(batch[0], lambda x: self.noise(self.net[:2](x))))
        self.log("val_loss", F.cross_entropy(out, batch[1]) + torch.rand(()))


def drawing(bench: Bench) -> Any:
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs in lockstep")
        return bench.fit(Draws(), {"num_microbatches": 1}, max_epochs=1, num_sanity_val_steps=0)


def in_lockstep(bench: Bench) -> Any:
    model = Texts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"num_sanity_val_steps": 0, "limit_predict_batches": 1}
        result = Bench(bench.pipeline).fit(model, max_epochs=1, **options)
        result["generated"] = model.texts, model.trainer.predict(model)
    said = [str(w.message) for w in caught if "runs in lockstep" in str(w.message)]
    is_first = bench.pipeline is not None and model.trainer.global_rank == 0
    assert len(said) == is_first, said
    return result


CASES: list[Case] = [
    *(hooks, several_loaders),
    of_hooks,
    *(stochastic_weight_averaging, callbacks_of_one_key, loggers, predictions, drawing),
    in_lockstep,
]
TWO = Matrix(CASES, timeout=150.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case, tmp_path_factory: Any) -> None:
    TWO.compare(case, str(tmp_path_factory.getbasetemp() / "hooks"))
