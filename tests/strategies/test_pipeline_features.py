"""Optimization features of the Trainer under ``smddp_pipeline``: the same as in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests import devices
from tests.strategies.learners import overflow_in_third_batch
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Gpt, Matrix, Net, assert_same, name_of, outcome

pytestmark = pytest.mark.filterwarnings("ignore:The provided params to be frozen:UserWarning")


# ---- gradients ----


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


class Own(Net):
    """A ``backward`` of its own; a tenth of the gradients stays; the rate warms up, every other step is skipped, and
    weights are clipped behind it."""

    def configure_optimizers(self) -> Any:
        def clip(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.clamp_(-0.2, 0.2)

        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(clip)
        return optimizer

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.trainer.global_step)
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def own_hooks_of_optimization(bench: Bench) -> Any:
    return bench.fit(Own(), max_epochs=1, gradient_clip_val=0.02, gradient_clip_algorithm="value")


# ---- precision ----


def bf16_mixed(bench: Bench) -> Any:
    """For `tests/gpu`; on CPUs `test_pipeline_precision.py` has it."""
    return bench.fit(Net(), precision="bf16-mixed")


def scaled(**options: Any) -> MixedPrecision:
    device = "cuda" if devices.is_cuda() else "cpu"
    return MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device, **options))


class Scaled(Evaluated):
    """Overflows. A fused optimizer unscales in its step; with it the last layers are frozen."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__(count=40)
        self.fused = fused
        self.net[4:].requires_grad_(not fused)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, fused=self.fused)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale())
        return loss

    def on_train_start(self) -> None:
        overflow_in_third_batch(self)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())


def fp16_with_overflow(bench: Bench) -> Any:
    plugin = scaled(init_scale=2.0**12, growth_interval=3)
    return bench.fit(Scaled(), plugins=[plugin], gradient_clip_val=0.5, accumulate_grad_batches=1)


def fp16_where_a_stage_trains_nothing(bench: Bench) -> Any:
    plugin = scaled(init_scale=2.0**12, growth_interval=3)
    return bench.fit(Scaled(fused=True), {"split": ["net.4"]}, plugins=[plugin])


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


# ---- compiled code: eager where the step is followed, compiled inside units ----

_compilations: list[str] = []


def counting(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """A backend that does nothing but count."""
    _compilations.append("graph")
    return graph.forward


@torch.compile(backend=counting)
def between(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(x * 2) * scale + x.mean(1, keepdim=True)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradients[0]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.linear(x)) + between(x, self.linear.bias)  # type: ignore[no-untyped-call, no-any-return]


class Modules(Net):
    """Modules compiled in place, one of them with a hook, and wrapped ones."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        for place in (2, 4):
            self.net[place] = Odd()
            self.net[place].compile(backend=counting)
        self.net[4].register_forward_hook(lambda module, args, output: output * 2)
        self.net[6] = torch.compile(self.net[6], backend=counting)


def modules_checkpointed(bench: Bench) -> Any:
    """Some on each rank."""
    options = {"activation_checkpointing": True, "split": ["net.5"]}
    with warnings.catch_warnings(action="ignore"):  # dynamo's own are many
        return bench.fit(Modules(), options, max_epochs=1, limit_train_batches=2)


def whole(bench: Bench) -> Any:
    model: Any = torch.compile(Net(), backend=counting)
    trainer = bench.trainer(max_epochs=1, limit_train_batches=2)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model)
    return outcome(model._orig_mod, trainer)


def something_was_compiled(bench: Bench) -> Any:
    return len(_compilations) > 0


CASES = [
    own_hooks_of_optimization,
    hooks_on_parameters,
    fp16_with_overflow,
    fp16_where_a_stage_trains_nothing,
    scheduled,
    finetuning,
    gpt,
    modules_checkpointed,
    whole,
]
TOLERANCE = {bf16_mixed: 0.02, fp16_with_overflow: 5e-3, fp16_where_a_stage_trains_nothing: 5e-3}
TWO = Matrix([*CASES, fp16_scale_too_large, something_was_compiled], timeout=200.0)


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


@pytest.mark.slow
def test_units_run_compiled() -> None:
    assert all(TWO.results(something_was_compiled))
