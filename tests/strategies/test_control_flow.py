"""Steps that change their path: with the epoch, the step's number, or from micro-batch to micro-batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.strategies.learners import CLASSES, samples
from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, name_of


class Mixed(Net):
    """Its path depends on the values of each micro-batch's first row, and on the epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        if self.current_epoch == 1:
            x = x + 1
        if len(batch[0]) == 1:  # a micro-batch: one process does what follows row by row
            if batch[0].sum() > 0:
                x = x * 2
        else:
            x = x * (1 + (batch[0].sum(1, keepdim=True) > 0).float())
        return F.cross_entropy(self.net[4:](x), batch[1])


def mixed(bench: Bench) -> Any:
    return bench.fit(Mixed(layers=5, batch_size=4, count=16), max_epochs=2)


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
    return bench.fit(Tasks(), {}, accumulate_grad_batches=2)


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


class Thawed(Net):
    """A BatchNorm without parameters that trains from the second epoch on; where it is is known from the first."""

    def __init__(self) -> None:
        super().__init__(count=16)
        self.net.insert(2, nn.BatchNorm1d(16, affine=False))

    def on_train_epoch_start(self) -> None:
        self.net[2].train(self.current_epoch > 0)


def thawed(bench: Bench) -> Any:
    return bench.fit(Thawed(), {"split": ["net.2"], "num_microbatches": 1}, max_epochs=2)


CASES = [mixed, selected, rehearsed, tasks, thawed]
TWO = Matrix([*CASES, plain], pipeline={"num_microbatches": 4})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.slow
def test_an_activation_that_is_first_used_later_behind_the_last_module_is_an_error_on_all_ranks() -> None:
    first, second = Matrix([annealed], pipeline={"num_microbatches": 4}).results(annealed)
    assert first == second
    assert re.match(r"ReplayError: pow at .*test_control_flow.py:\d+ uses a tensor of another stage", first)
    assert "in every step from the first on" in first
    assert "last checkpoint" in first


@pytest.mark.slow
def test_nothing_is_taken_for_a_read_of_the_batch() -> None:
    """Else each micro-batch would be rehearsed for itself, in each step."""
    assert TWO.results(plain) == [(False, False)] * 2


@pytest.mark.slow
def test_more_paths_than_can_be_traced_are_refused_on_all_ranks() -> None:
    first, second = Matrix([endless]).results(endless)
    assert first == second
    assert first.count("test_control_flow.py") == 2, first
