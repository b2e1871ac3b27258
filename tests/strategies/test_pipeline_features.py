"""Optimization features of the Trainer under ``smddp_pipeline``: the same as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests import devices
from tests.strategies import pipeline_learners
from tests.strategies.learners import CLASSES, INPUTS
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Gpt, Matrix, assert_same, name_of, outcome

pytestmark = pytest.mark.filterwarnings("ignore:The provided params to be frozen:UserWarning")


class Net(pipeline_learners.Net):
    """With few batches, as there are many cases."""

    def __init__(self, batch_size: int = 8, count: int = 24) -> None:
        super().__init__(batch_size=batch_size, count=count)


# ---- accumulation and clipping ----


def accumulation(bench: Bench) -> Any:
    return bench.fit(Net(count=32), accumulate_grad_batches=3, max_epochs=1)  # the last window has one batch


def clip_by_norm(bench: Bench) -> Any:
    return bench.fit(Net(), gradient_clip_val=0.1)


def clip_by_value(bench: Bench) -> Any:
    return bench.fit(Net(), gradient_clip_val=0.01, gradient_clip_algorithm="value", accumulate_grad_batches=2)


def clip_by_value_without_gradients(bench: Bench) -> Any:
    """The second stage has none: its only layer is frozen."""
    model = Net()
    model.net[6].requires_grad_(False)
    return bench.fit(model, {"split": ["net.6"]}, gradient_clip_val=0.01, gradient_clip_algorithm="value", max_epochs=1)


class OwnClipping(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        value = 0.2 / (1 + self.current_epoch)
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


def own_clipping(bench: Bench) -> Any:
    return bench.fit(OwnClipping())


class OwnBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


def own_backward(bench: Bench) -> Any:
    return bench.fit(OwnBackward(), max_epochs=1)


class Hooked(Net):
    """Hooks on parameters, some of which are removed, and come, later. What they do is not linear."""

    def on_fit_start(self) -> None:
        self.handles = [p.register_hook(lambda g: g.clamp(-0.02, 0.02)) for p in self.parameters()]
        self.net[4].weight.register_post_accumulate_grad_hook(self.normalise)

    @staticmethod
    def normalise(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(parameter.grad.norm().clamp(min=0.05))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for handle in self.handles[::2]:
                handle.remove()
            self.net[0].weight.register_hook(lambda g: 0.01 * g.sign())


def hooks_on_parameters(bench: Bench) -> Any:
    """Also when the module is whole again."""
    model = Hooked()
    result = bench.fit(model, accumulate_grad_batches=2)
    model.zero_grad()
    model.loss(next(iter(model.train_dataloader()))).backward()
    return {**result, "behind": [p.grad for p in model.parameters()]}


# ---- precision ----


def bf16_mixed(bench: Bench) -> Any:
    return bench.fit(Net(), precision="bf16-mixed")


def bf16_true(bench: Bench) -> Any:
    return bench.fit(Net(), precision="bf16-true", max_epochs=1)


def scaled(**options: Any) -> MixedPrecision:
    device = "cuda" if devices.is_cuda() else "cpu"
    return MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device, **options))


class Scaled(Evaluated):
    """The gradient of its first layer overflows in the third batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale())
        return loss

    def on_train_start(self) -> None:
        def overflow(gradient: Tensor) -> Tensor:
            return gradient * float("inf") if self.trainer.fit_loop.batch_idx == 2 else gradient

        self.net[0].weight.register_hook(overflow)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())


def fp16_with_overflow(bench: Bench) -> Any:
    plugin = scaled(init_scale=2.0**12, growth_interval=3)
    return bench.fit(Scaled(), plugins=[plugin], gradient_clip_val=0.5, accumulate_grad_batches=1)


def fp16_accumulation(bench: Bench) -> Any:
    model = Scaled()
    plugin = scaled(init_scale=2.0**12, growth_interval=3)
    trainer = bench.trainer(plugins=[plugin], accumulate_grad_batches=2)
    trainer.fit(model)
    return outcome(model, trainer, scale=plugin.scaler.get_scale())


def fp16_scale_too_large(bench: Bench) -> Any:
    """The first steps overflow everywhere until the scale fits."""
    plugin = scaled(init_scale=2.0**24)
    result = bench.fit(Net(), plugins=[plugin])
    return {**result, "scale": plugin.scaler.get_scale()}


# ---- schedulers and parameter groups ----


class Scheduled(Evaluated):
    def __init__(self, scheduler: str) -> None:
        super().__init__(count=16)
        self.scheduler = scheduler
        self.rates: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.scheduler == "plateau":
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.scheduler == "one_cycle":
            total = self.trainer.estimated_stepping_batches
            cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(total))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        raise ValueError(self.scheduler)


def scheduled(bench: Bench) -> Any:
    results = []
    for name in ("plateau", "one_cycle"):
        model = Scheduled(name)
        results.append((bench.fit(model, max_epochs=2), model.rates))
    return results


class Groups(Net):
    """Groups picked by name, one with frozen parameters; biases without decay."""

    def configure_optimizers(self) -> Any:
        self.net[2].requires_grad_(False)
        named = list(self.named_parameters())
        decayed = [p for name, p in named if name.endswith("weight")]
        others = [p for name, p in named if not name.endswith("weight") and not name.startswith("net.6")]
        head = [p for name, p in named if name == "net.6.bias"]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "lr": 0.001},
            {"params": head, "lr": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


def groups(bench: Bench) -> Any:
    model = Groups()
    return {**bench.fit(model, max_epochs=1), "frozen": [p.requires_grad for p in model.parameters()]}


class UnfreezeLater(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:4])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[2], optimizer, lr=0.05)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net[:4], optimizer, lr=0.01)  # net.2 is there already


class Unfrozen(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


def finetuning(bench: Bench) -> Any:
    return bench.fit(Unfrozen(), callbacks=[UnfreezeLater()], max_epochs=3)


# ---- other modules ----


def gpt(bench: Bench) -> Any:
    return bench.fit(Gpt(), gradient_clip_val=0.3, max_epochs=1)


def gpt_checkpointed(bench: Bench) -> Any:
    return bench.fit(Gpt(), {"activation_checkpointing": True}, max_epochs=1)


class Chosen(Net):
    """A head that depends on the batch, and one that is never used."""

    def __init__(self) -> None:
        super().__init__(batch_size=4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.unused = nn.Linear(CLASSES, INPUTS)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=0.1)


def unused(bench: Bench) -> Any:
    return bench.fit(Chosen(), max_epochs=1)


class WithoutModules(Net):
    """Validates without any of its modules."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("rows", float(len(batch[0])))
        self.log("mean", batch[0].mean())

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def validating_without_modules(bench: Bench) -> Any:
    return bench.fit(WithoutModules(), max_epochs=1)


class Closure(Net):
    """An own ``optimizer_step``: warms the rate up, and skips every other step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.trainer.global_step)
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def own_optimizer_step(bench: Bench) -> Any:
    return bench.fit(Closure(), max_epochs=1)


CASES = [
    hooks_on_parameters,
    clip_by_value_without_gradients,
    own_clipping,
    own_backward,
    bf16_true,
    fp16_with_overflow,
    scheduled,
    groups,
    finetuning,
    gpt,
    unused,
    own_optimizer_step,
    validating_without_modules,
]
TOLERANCE = {bf16_mixed: 0.02, bf16_true: 0.05, fp16_with_overflow: 5e-3, fp16_accumulation: 5e-3}
TWO = Matrix([*CASES, fp16_scale_too_large])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case, tolerance=TOLERANCE.get(case, 1e-5))


@pytest.mark.slow
def test_all_stages_skip_overflowing_steps_together() -> None:
    """Gradients of micro-batches overflow later than a batch's, so one process needs a smaller scale."""
    first, second = TWO.results(fp16_scale_too_large)
    assert_same(first, second, 0.0)
    assert 2**14 <= first["scale"] < 2**24
    assert all(value.isfinite().all() for value in first["weights"].values())
