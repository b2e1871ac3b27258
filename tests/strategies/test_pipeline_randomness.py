"""Random numbers: those of accumulation, whoever draws them and where; and the same on all ranks behind a run."""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.learners import CLASSES
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, assert_same, name_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The loss of:UserWarning"),  # rows are mixed with others
]
ONE = {"num_microbatches": 1, "schedule": "gpipe"}
FOUR = {"num_microbatches": 4}


class LayerDrop(Net):
    """What torch draws decides on modules and sizes; other numbers that it draws are used, and modules draw."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        self.dropout = nn.Dropout(0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:2](batch[0] + torch.randn_like(batch[0]) / 10)
        for index in range(2, 8, 2):
            if torch.rand([]) < 0.4:
                continue
            x = self.dropout(self.net[index : index + 2](x))
        keep = torch.rand(len(x)) < 0.7
        keep[0] = True
        shift = int(torch.randint(1, 4, (1,)))
        x = torch.cat([x[:, shift:], x[:, :shift]], 1)[keep]
        loss = F.cross_entropy(self.net[8:](F.dropout(x, self.dropout.p)), batch[1][keep])
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(torch.rand([]).item())


def layer_drop(bench: Bench) -> Any:
    torch.manual_seed(3)
    return bench.fit(LayerDrop(), FOUR, max_epochs=1)


class NewDropout(Net):
    """A layer's dropout is another module from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        for index in (1, 3):
            self.net[index] = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.net[1][2], self.net[3][2] = nn.Dropout(0.4), nn.Dropout(0.4)


def new_dropout(bench: Bench) -> Any:
    torch.manual_seed(3)
    return bench.fit(NewDropout(), {**FOUR, "split": ["net.3"]}, max_epochs=2)


class LeftOut(Net):
    """Layers in a list are left out by chance, in the first step all of them; ``early`` is called before them."""

    def __init__(self) -> None:
        super().__init__(layers=6, count=64)
        first, *hidden, head = [layer for layer in self.net if isinstance(layer, nn.Linear)]
        self.net = nn.ModuleDict({"first": first, "early": nn.LayerNorm(16)})
        self.net["layers"] = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in hidden)
        self.net["head"] = head
        self.called: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net["early"](self.net["first"](batch[0]))
        called = [layer for layer in self.net["layers"] if torch.rand([]) < 0.5 and self.global_step]
        for layer in called:
            x = x + layer(x)
        self.called.append(len(called))
        return F.cross_entropy(self.net["head"](x), batch[1])


def left_out(bench: Bench) -> Any:
    torch.manual_seed(3)
    model = LeftOut()
    return bench.fit(model, {**ONE, "split": ["net.early"]}, max_epochs=2), model.called


class Seeded(Net):
    """The same noise in each epoch: a step seeds a generator of its own, one that it holds, or torch's default one."""

    def __init__(self, kind: str) -> None:
        super().__init__(count=24)
        self.kind, self.generator = kind, torch.Generator()

    def noise(self, shape: torch.Size, batch_idx: int) -> Tensor:
        if self.kind == "default":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(batch_idx)
                return torch.randn(shape)
        generator = self.generator if self.kind == "held" else torch.Generator()
        return torch.randn(shape, generator=generator.manual_seed(batch_idx))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) + self.noise((len(batch[1]), CLASSES), batch_idx), batch[1])


def seeded_in_the_step(bench: Bench, kind: str) -> Any:
    return bench.fit(Seeded(kind), {}, max_epochs=1)


class Shuffled(Net):
    """From the second epoch on the step draws: each rank would draw other numbers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.current_epoch == 1:
            order = torch.randperm(len(x))
            x, y = x[order], y[order]
        return F.cross_entropy(self.net(x) + torch.arange(len(x))[:, None] / 10, y)


def shuffled(bench: Bench) -> Any:
    torch.manual_seed(3 + int(os.environ.get("RANK", "0")))
    return bench.fit(Shuffled(count=24), ONE, max_epochs=2)


class Mask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: nn.Module) -> Tensor:
        mask = dropout(torch.ones_like(x))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask, None


class DrawnWithinFunction(nn.Module):
    """A function of autograd calls a module that draws, as reversible layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Any:
        return Mask.apply(self.linear(x), self.dropout)  # type: ignore[no-untyped-call]


class WithinFunctions(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[1], self.net[3] = DrawnWithinFunction(), DrawnWithinFunction()


def within_functions(bench: Bench) -> Any:
    torch.manual_seed(3)
    return bench.fit(WithinFunctions(), FOUR, max_epochs=1)


class DrawingInHooks(Evaluated):
    """Torch draws on all ranks in hooks; ``dropout`` also on the rank that has it."""

    def __init__(self, dropout: float) -> None:
        super().__init__(count=16)
        self.net[3] = nn.Sequential(self.net[3], nn.Dropout(dropout))

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(torch.rand(()).item())

    def on_validation_epoch_end(self) -> None:
        self.losses.append(torch.randn(3).sum().item())


def behind_runs(bench: Bench, dropout: float) -> list[Any]:
    torch.manual_seed(3)
    random.seed(4)
    model, trainer = DrawingInHooks(dropout), bench.trainer({"num_microbatches": 2}, max_epochs=1)
    drawn: list[Any] = []
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        loaders = {} if run == trainer.fit else {"dataloaders": model.train_dataloader()}
        run(model, **loaders)
        drawn.append((torch.rand(3), random.random()))
    return [drawn, model.losses]


SEEDED = [functools.partial(seeded_in_the_step, kind=kind) for kind in ("new", "held", "default")]
PLAIN, WITH_DROPOUT = (functools.partial(behind_runs, dropout=dropout) for dropout in (0.0, 0.5))
CASES: list[Case] = [
    layer_drop,
    left_out,
    shuffled,
    within_functions,
    new_dropout,
    *SEEDED,
    PLAIN,
]
TWO = Matrix([*CASES, WITH_DROPOUT])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_draws_what_accumulation_draws(case: Case) -> None:
    TWO.compare(case)


def test_ranks_draw_the_same_behind_a_run_with_dropout() -> None:
    first, second = TWO.results(WITH_DROPOUT)
    assert_same(first, second, 0.0)
