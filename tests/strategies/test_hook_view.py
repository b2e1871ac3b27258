"""Hooks and callbacks that use parameters, as people write them: the same in a pipeline as in one process."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.learners import INPUTS
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, name_of, outcome

pytestmark = pytest.mark.slow


class MeanTeacher(Evaluated):
    """Clips by hand; the teacher follows the student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("total", nn.utils.clip_grad_norm_(self.parameters(), 0.05))
        self.log_dict(grad_norm(self, 2))
        self.log("weights", torch.stack([p.detach().norm() for p in self.parameters()]).norm())

    def on_train_batch_end(self, *args: Any) -> None:
        for t, s in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            t.data.mul_(0.9).add_(s.data, alpha=0.1)


class Shadow(Callback):
    """An average of the weights in a dict, of the callback's own, that goes into the checkpoint."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for name, value in module.state_dict().items():
            if name not in self.shadow:
                self.shadow[name] = value.clone()
            else:
                self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = self.shadow


class OnRankZero(Callback):
    """Writes weights to a file on rank 0 alone."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            half = {name: value.detach().cpu().clone() / 2 for name, value in module.state_dict().items()}
            torch.save(half, self.directory / "half.pt")
            module.seen = [float(p.detach().cpu().abs().max()) for p in module.parameters()]


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


class Samples(Evaluated):
    """Calls the model in hooks, and looks at what it returns."""

    def on_train_epoch_end(self) -> None:
        x = torch.linspace(-1, 1, 3 * INPUTS).view(3, INPUTS)
        self.net.eval()
        with torch.no_grad():
            out = self.net(x)
        self.net.train()
        self.log("sampled", out.max())
        self.losses.append(out[0, int(out[0].argmax())].item())


class Noise(Evaluated):
    def on_train_epoch_end(self) -> None:
        torch.manual_seed(7 + self.current_epoch)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.01 * torch.randn_like(p))
            self.net[2].reset_parameters()


SHORT = {"limit_train_batches": 3, "limit_val_batches": 2}
TWICE = ("Consolidated", "Samples", "Noise")  # whose hooks change what the next epoch does


def fit(bench: Bench, module: Any) -> Any:
    return bench.fit(globals()[module](), max_epochs=2 if module in TWICE else 1, **SHORT)


def shadow(bench: Bench) -> Any:
    model, callback = Evaluated(), Shadow()
    trainer = bench.trainer(callbacks=[callback], max_epochs=1, **SHORT)
    trainer.fit(model)
    path = Path(bench.directory) / "shadow.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["shadow"]
    return outcome(model, trainer, saved=saved, shadow={name: value.clone() for name, value in callback.shadow.items()})


def on_rank_zero(bench: Bench) -> Any:
    model = Evaluated()
    trainer = bench.trainer(callbacks=[OnRankZero(bench.directory)], max_epochs=2, **SHORT)
    trainer.fit(model)
    return outcome(model, trainer, half=torch.load(Path(bench.directory) / "half.pt"))


def stochastic_weight_averaging(bench: Bench) -> Any:
    return bench.fit(Evaluated(), callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)], max_epochs=3)


def weight_averaging(bench: Bench) -> Any:
    return bench.fit(Evaluated(), callbacks=[WeightAveraging()], max_epochs=1, **SHORT)


CASES: list[Case] = [
    *(functools.partial(fit, module=name) for name in ("MeanTeacher", "Consolidated", "Samples", "Noise")),
    shadow,
    on_rank_zero,
    weight_averaging,
    stochastic_weight_averaging,
]
TWO = Matrix(CASES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a directory for each case's ranks, and for its one process."""
    root = tmp_path_factory.mktemp("hook_view")
    for case in CASES:
        for kind in ("ranks", "alone"):
            (root / name_of(case) / kind).mkdir(parents=True)
    return str(root)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_as_in_one_process(case: Case, directory: str) -> None:
    TWO.compare(case, directory)
