"""Lightning's hooks in Lightning's order, and its loops with all limits: the same as in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, name_of, outcome

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
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_validation_start", "on_validation_end",
    "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_model_eval", "on_validation_model_train", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "backward", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "configure_gradient_clipping", "configure_model", "configure_optimizers",
    "configure_callbacks", "prepare_data", "setup", "teardown", "on_save_checkpoint", "on_load_checkpoint",
    "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "on_predict_start",
    "on_predict_end", "on_test_start", "on_test_end", "on_test_batch_end", "on_predict_batch_end",
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

    model = type("Heard", (Heard,), {name: hearing(name) for name in MODULE_HOOKS})(count=24)
    trainer = bench.trainer(callbacks=[Listener(calls)], accumulate_grad_batches=2, gradient_clip_val=1.0)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    trainer.predict(model)
    return calls, outcome(model, trainer)


# ---- limits ----


def limits(bench: Bench) -> Any:
    limited = {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": -1}
    return bench.fit(Evaluated(), **limited, val_check_interval=1, check_val_every_n_epoch=2)


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


CASES: list[Case] = [
    hooks,
    limits,
    several_loaders,
]
TWO = Matrix(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)
