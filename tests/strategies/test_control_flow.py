"""Steps that change their path, read values between modules, or have modules whose sizes depend on values."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.strategies.learners import CLASSES, samples
from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, name_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ONE = {"num_microbatches": 1, "schedule": "gpipe"}


class Selected(Net):
    """Goes on with some rows of the batch, more or fewer in each: shapes of batches do not tell."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        positive = batch[0][:, 0] > 0
        x = self.net[:2](batch[0])[positive]
        x = self.net[2:4](x).index_select(0, (x.shape[0] - 1 - positive[positive].nonzero().flatten()))
        return F.cross_entropy(self.net[4:](x), batch[1][positive].flip(0), reduction="sum") / len(batch[0])


def selected(bench: Bench) -> Any:
    return bench.fit(Selected(layers=5, count=24))


class Rehearsed(Net):
    """Rows of earlier batches join each batch once there are any: other sizes, of batches of one kind."""

    def __init__(self) -> None:
        super().__init__(count=24)
        self.memory: list[list[Tensor]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([torch.cat(parts) for parts in zip(batch, *self.memory[:1], strict=True)])

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.memory.append([part[:2] for part in batch])


def rehearsed(bench: Bench) -> Any:
    return bench.fit(Rehearsed(), {"num_microbatches": "auto"})


class Annealed(Net):
    """Behind its last module it uses activations of earlier ones, but only later, and by turns."""

    count_down = 2

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.count_down -= 1
        first = self.net[:2](batch[0])
        second = self.net[2:4](first)
        loss = F.cross_entropy(self.net[4:](second), batch[1])
        beta = max(0.0, -0.1 * self.count_down)
        if beta > 0:
            loss = loss + beta * second.pow(2).mean()
        if self.current_epoch == 2:
            loss = loss + first.abs().mean()
        return loss


def annealed(bench: Bench) -> str:
    with pytest.raises(RuntimeError) as caught:
        bench.fit(Annealed(layers=6, count=16), max_epochs=4)
    return f"{type(caught.value).__name__}: {caught.value}"


class Tasks(Net):
    """A head for each task, by a word in the batch: where rehearsals leave the step."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.heads = nn.ModuleDict({task: nn.Linear(CLASSES, CLASSES) for task in ("a", "b")})

    def training_step(self, batch: tuple[str, Tensor, Tensor], batch_idx: int) -> Tensor:
        task, inputs, targets = batch
        return F.cross_entropy(self.heads[task](self.net(inputs)), targets)

    def train_dataloader(self) -> Any:
        def collate(rows: list[Any]) -> tuple[str, Tensor, Tensor]:
            inputs, targets = zip(*rows, strict=True)
            inputs = torch.stack(inputs)
            return "ab"[int(inputs[0, 0] > 0)], inputs, torch.stack(targets)

        return DataLoader(samples(32), batch_size=4, collate_fn=collate)


def tasks(bench: Bench) -> Any:
    """Where a path cannot be left, as gradients are accumulated."""
    return bench.fit(Tasks(), accumulate_grad_batches=2)


class Endless(Net):
    """Goes a longer way with each batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        for _ in range(batch_idx):
            x = x * 1.01
        return F.cross_entropy(self.net[4:](x), batch[1])


def endless(bench: Bench) -> str:
    with pytest.raises(ValueError, match="took 16 paths") as caught:
        bench.fit(Endless(count=160), {"num_microbatches": 2}, max_epochs=1)
    return str(caught.value)


class Plain(Net):
    """Its path depends on nothing, and no module draws random numbers."""

    def on_train_batch_end(self, *args: Any) -> None:
        graph = self.trainer.strategy._pipelined.partitioned.plan.graph
        self.reads = (graph.reads_batch, graph.draws)


def plain(bench: Bench) -> Any:
    model = Plain(count=16)
    bench.fit(model)
    return model.reads


class Encoder(nn.Module):
    """Returns a distribution, which validates its arguments."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.mean, self.spread = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.mean(x), self.spread(x).exp())


class Variational(Net):
    """A distribution between encoder and decoder."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        self.encoder = Encoder()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        q = self.encoder(self.net[:3](batch[0]))
        divergence = kl_divergence(q, Normal(torch.zeros(16), torch.ones(16))).mean()
        out = self.net[3:](q.mean + 0 * q.rsample())
        return F.cross_entropy(out, batch[1]) + 0.1 * divergence - 0.01 * q.log_prob(q.mean.detach()).mean()


def variational(bench: Bench) -> Any:
    return bench.fit(Variational(), {"num_microbatches": "auto"})


class Numbers(Net):
    """Checks an activation, logs a number of it, and computes with others, before more modules."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        if torch.isnan(x).any():
            raise ValueError("not a number")
        assert x.isfinite().all()
        self.log("mean", x.mean().item())
        best = x.argmax(1).tolist()
        x = x * (1 + max(best) / 100 + x.detach().std(1).mean().item())
        return F.cross_entropy(self.net[4:](x), batch[1])


def numbers(bench: Bench) -> Any:
    return bench.fit(Numbers(layers=6), ONE)


class Decides(nn.Module):
    """Decides by an activation, behind its own modules but before others of the step."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        if x.max() > 0.5:
            x = x * 2
        return x


class Inside(Net):
    def __init__(self) -> None:
        super().__init__(layers=5)
        self.net.insert(4, Decides())


def inside_a_module(bench: Bench) -> Any:
    return bench.fit(Inside(), ONE)


class Expert(nn.Module):
    """Rows go where a gate sends them: the sizes inside of this module depend on values."""

    def __init__(self, width: int = 16, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        chosen = weights.argmax(1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return x + out


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__(layers=5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.net[3], self.net[5] = Expert(), Expert()


def experts(bench: Bench) -> Any:
    return bench.fit(Mixture())


class Chosen(Net):
    """Between modules it goes on with the rows that a module's values choose."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        x = x[x.sum(1) > 0]
        return self.net[4:](x).pow(2).sum() / len(batch[0])


def chosen(bench: Bench) -> Any:
    return bench.fit(Chosen())


def _smooth(x: Tensor, slope: float) -> Tensor:
    return torch.where(x > 0, x, slope * x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that it is deprecated
    smooth: Any = torch.jit.script(_smooth)


class Smooth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return smooth(x, 0.1)


class ScriptedInside(Net):
    """A function that is scripted, inside a module."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        self.net[1] = Smooth()


def scripted_inside(bench: Bench) -> Any:
    return bench.fit(ScriptedInside())


CASES = [selected, rehearsed, tasks, variational, inside_a_module, experts, chosen, scripted_inside]
TWO = Matrix([*CASES, plain, annealed, endless], pipeline={"num_microbatches": 4})
THREE = Matrix([numbers], 3)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


def test_numbers_pass_through_stages() -> None:
    THREE.compare(numbers)


def test_an_activation_that_is_first_used_later_behind_the_last_module_is_an_error_on_all_ranks() -> None:
    first, second = TWO.results(annealed)
    assert first == second
    assert re.match(r"ReplayError: pow at .*test_control_flow.py:\d+ uses a tensor of another stage", first)
    assert "in every step from the first on" in first
    assert "last checkpoint" in first


def test_nothing_is_taken_for_a_read_of_the_batch() -> None:
    """Else each micro-batch would be rehearsed for itself, in each step."""
    assert TWO.results(plain) == [(False, False)] * 2


def test_more_paths_than_can_be_traced_are_refused_on_all_ranks() -> None:
    first, second = TWO.results(endless)
    assert first == second
    assert first.count("test_control_flow.py") == 2, first
