"""Tensors in objects beside the module that a step writes in place: refused in training, whole batches elsewhere."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F

from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.tracer import trace
from tests.strategies.pipeline_learners import Bench, Case, Cases, Matrix, Net

pytestmark = pytest.mark.slow

TOTALS = torch.zeros(2)


class Stats:
    """A helper of the user's."""

    def __init__(self) -> None:
        self.total, self.table = torch.zeros(()), torch.zeros(4, 16)

    def sums(self) -> list[float]:
        return [float(self.total), *self.table.sum(1).tolist(), *TOTALS.tolist()]


class Queue(Callback):
    def __init__(self) -> None:
        self.stats = Stats()


class Writing(Net):
    """Shows in a hook what its steps have written."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = Stats()

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += [*self.stats.sums(), *self.trainer.callbacks[0].stats.sums()]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        early = self.net[0](batch[0])
        out = self.net[1:](early)
        self.write(batch, early.detach(), out.detach(), batch_idx)
        return F.cross_entropy(out, batch[1])

    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        pass


class OfModules(Writing):
    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        self.stats.total += early.sum()


class Global(Writing):
    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        torch.add(TOTALS, out.sum(), out=TOTALS)


class InViews(Writing):
    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        table = self.trainer.callbacks[0].stats.table
        table[batch_idx % 4] = early.mean(0)
        self.stats.total.data.add_(batch[0].sum())  # each stage would do that
        table.view(-1).index_add_(0, torch.tensor([1, 2]), out.sum().expand(2))


class Harmless(Writing):
    """Writes what it has made itself."""

    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        out.clone().view(-1)[0] = 1.0
        torch.zeros(3).add_(batch[0].sum()).clamp_(max=0.0)


class Validated(Writing):
    """Its training step writes nothing."""

    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        pass

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self.net(batch[0])
        self.stats.total += out.sum()

    val_dataloader = Writing.train_dataloader

    def on_validation_epoch_end(self) -> None:
        self.losses += self.stats.sums()


def refused(name: str) -> str:
    """What a rank says to training ``name``."""
    TOTALS.zero_()
    try:
        Bench({}, "").fit(globals()[name](), callbacks=[Queue()])
    except SplitError as error:
        return str(error)
    return ""


REFUSED = Cases(refused, [(model.__name__,) for model in (OfModules, Global, InViews)], timeout=240.0)


@pytest.mark.parametrize("model", [OfModules, Global, InViews])
def test_a_training_step_that_writes_foreign_tensors_is_refused_on_all_ranks(model: type[Writing]) -> None:
    texts = REFUSED.results((model.__name__,))
    assert len(texts) == 2
    for text in texts:
        assert "writes a tensor in place at" in text
        assert "test_external_writes.py" in text
        assert "Keep it in an attribute of the LightningModule itself" in text


def trained(bench: Bench, model: type[Writing], expected: str) -> Any:
    """What was trained; on the first rank with a warning about a step that has ``expected`` in it, if any."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bench.fit(model(), max_epochs=1, num_sanity_val_steps=0, callbacks=[Queue()])
    found = [str(warning.message) for warning in caught if "_step` runs" in str(warning.message)]
    first = bench.pipeline is not None and dist.get_rank() == 0
    assert [expected in text for text in found] == [True] * (first and bool(expected)), found
    return result


CASES = {
    "writes what it has made": functools.partial(trained, model=Harmless, expected=""),
    "validation writes": functools.partial(trained, model=Validated, expected="writes a tensor in place at"),
}
TRAINED = Matrix(list(CASES.values()))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_one_process(case: Case) -> None:
    TRAINED.compare(case)


# ---- what is noted ---------------------------------------------------------------------------------------------------


def test_what_was_there_is_put_back() -> None:
    root, other = torch.nn.Linear(2, 2), torch.arange(4.0)
    weight = root.weight.clone()

    @torch.no_grad()
    def step() -> None:
        other[2:].add_(1)
        other.mul_(2)  # what was before the first write counts
        root.weight.zero_()
        torch.ones(2).zero_()

    (place,) = trace(step, root, torch.device("cpu")).external_writes
    assert "test_external_writes.py" in place
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(root.weight, weight)
