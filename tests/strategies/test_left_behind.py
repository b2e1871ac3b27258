"""What steps leave in attributes for hooks to read: of modules, by forward hooks, in callbacks and helpers."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.learners import CLASSES, INPUTS
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, name_of

pytestmark = pytest.mark.slow


class Keeps(nn.Module):
    """A layer that keeps what it made, a summary, a history and a count; and a buffer's worth of positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls, self.history, self.positions = 0, [], None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None or len(self.positions) < x.shape[1]:
            self.positions = torch.arange(x.shape[1]) / x.shape[1]
        made = torch.tanh(self.linear(x) + self.positions)
        self.made, self.gate = made.detach(), made.abs().mean()
        self.history.append(made.detach().mean())
        self.calls += 1
        return x + made


class Attention(Evaluated):
    """Hooks read what layers have kept."""

    layer: type[Keeps] = Keeps

    def __init__(self) -> None:
        super().__init__(count=24)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(INPUTS, 16), *(self.layer(16) for _ in range(3)), nn.Linear(16, CLASSES))

    def look(self) -> None:
        for layer in self.net[1:-1]:
            self.losses += [float(layer.made.norm()), float(layer.gate.detach()), float(layer.history[-1])]
            self.losses += [layer.calls, len(layer.history), *layer.made.shape]
        self.log("gates", torch.stack([layer.gate.detach() for layer in self.net[1:-1]]).mean())

    def on_train_batch_end(self, *args: Any) -> None:
        self.look()

    def on_validation_batch_end(self, *args: Any) -> None:
        self.look()


class KeepsFirst(Keeps):
    """Keeps what the first batches made; from then on it is what the pipeline has left."""

    keeps_first = True

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.keeps_first:
            self.first = self.made
        return result


class WholeLater(Attention):
    """From the fourth batch on no pipeline can run the step, so that all ranks go on with the whole module."""

    layer = KeepsFirst

    def on_train_batch_start(self, *args: Any) -> None:
        for layer in self.net[1:-1]:
            layer.keeps_first = self.global_step < 3

    def look(self) -> None:
        super().look()
        self.losses += [float(layer.first.norm()) for layer in self.net[1:-1]]

    def loss(self, batch: list[Tensor]) -> Tensor:
        if self.training and self.global_step >= 3:
            with torch.no_grad():
                self.net[0].weight.mul_(0.99)
        return super().loss(batch)


class OwnAttributes(Evaluated):
    """The module's own attributes, from early layers and from late ones."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net[0](batch[0])
        self.early, self.summary = x.detach(), x.detach().mean()
        x = self.net[1:](x)
        self.late = x.detach().softmax(1)
        return F.cross_entropy(x, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += [float(self.early.norm()), float(self.summary), float(self.late.std()), *self.early.shape]

    def on_validation_batch_end(self, *args: Any) -> None:
        self.losses += [float(self.early.norm()), float(self.summary), *self.late.shape]


class Features(Evaluated):
    """Forward hooks put what layers return into a dict, by name and by layer."""

    def __init__(self) -> None:
        super().__init__(count=24)
        self.by_name: dict[str, Tensor] = {}
        self.by_layer: dict[nn.Module, Tensor] = {}
        for name, layer in self.net.named_children():
            layer.register_forward_hook(functools.partial(self.keep, name))

    def keep(self, name: str, layer: nn.Module, args: Any, result: Tensor) -> None:
        self.by_name[name] = result.detach()
        self.by_layer[layer] = result.detach()

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += [float(value.norm()) for value in self.by_name.values()]
        self.losses += [float(value.norm()) for value in self.by_layer.values()]


class Saved:
    """As in older tutorials."""

    def __init__(self, layer: nn.Module) -> None:
        self.features: Tensor | None = None
        layer.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, args: Any, result: Tensor) -> None:
        self.features = result.detach()


class Helpers(Features):
    def __init__(self) -> None:
        super().__init__()
        self.saved = [Saved(self.net[0]), Saved(self.net[4])]

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.losses += [float(saved.features.norm()) for saved in self.saved]


class Watcher(Callback):
    """Keeps activations itself."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.activations: dict[str, Tensor] = {}
        self.probe, self.probed = nn.Identity(), dict[nn.Module, Tensor]()  # a key without a name in the module
        self.handles = [
            layer.register_forward_hook(functools.partial(self.keep, name))
            for name, layer in pl_module.net.named_children()
        ]

    def keep(self, name: str, layer: nn.Module, args: Any, result: Tensor) -> None:
        self.activations[name] = self.probed[self.probe] = result.detach()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, value in self.activations.items():
            pl_module.log(f"dead/{name}", (value.abs() < 0.1).float().mean())
            pl_module.losses.append(float(value.norm()))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for handle in self.handles:
            handle.remove()


class OnOneRank(Watcher):
    """Its hooks look at nothing: other ranks do not have it."""

    def keep(self, name: str, layer: nn.Module, args: Any, result: Tensor) -> None:
        self.activations[name] = result

    on_train_batch_end = Callback.on_train_batch_end


class WeightNorm(Evaluated):
    """The older kind sets ``weight`` in each call."""

    def __init__(self) -> None:
        super().__init__()
        for index in (0, 2, 4):
            with pytest.warns(FutureWarning, match="weight_norm"):
                nn.utils.weight_norm(self.net[index])

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += [float(self.net[index].weight.detach().norm()) for index in (0, 2, 4)]


def fit(bench: Bench, module: str) -> Any:
    model = globals()[module]()
    callbacks: list[Callback] = [Watcher()] if module in ("Evaluated", "Helpers") else []
    if module == "Attention" and os.environ.get("RANK") == "1":
        callbacks.append(OnOneRank())
    with warnings.catch_warnings():
        if module == "WholeLater":
            warnings.filterwarnings("ignore", "The training step is run as a whole on every rank")
        result = bench.fit(model, max_epochs=2 if isinstance(model, Attention) else 1, callbacks=callbacks)
    if isinstance(model, Attention):
        kept = [(layer.calls, layer.made.clone(), layer.gate.detach().clone()) for layer in model.net[1:-1]]
        result["kept"], result["history"] = kept, [list(layer.history) for layer in model.net[1:-1]]
    return result


CASES: list[Case] = [
    functools.partial(fit, module=name)
    for name in ("Attention", "WholeLater", "OwnAttributes", "Helpers", "WeightNorm")
]
# `Helpers` has both kinds of hooks, and the callback.
MORE_CASES: list[Case] = [functools.partial(fit, module=name) for name in ("Features", "Evaluated")]
SEVERAL_STAGES = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
MATRIX = Matrix(CASES)
INTERLEAVED = Matrix([CASES[2]], pipeline=SEVERAL_STAGES)
MORE = Matrix(MORE_CASES)
MORE_INTERLEAVED = Matrix([CASES[0]], pipeline=SEVERAL_STAGES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_hooks_read_what_a_step_has_kept(case: Case) -> None:
    MATRIX.compare(case)


@pytest.mark.parametrize("case", INTERLEAVED.cases, ids=name_of)
def test_with_several_stages_on_a_rank(case: Case) -> None:
    INTERLEAVED.compare(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES, ids=name_of)
def test_hooks_read_more_of_what_a_step_has_kept(case: Case) -> None:
    MORE.compare(case)


@pytest.mark.exhaustive
def test_layers_keep_with_several_stages_on_a_rank() -> None:
    MORE_INTERLEAVED.compare(CASES[0])
