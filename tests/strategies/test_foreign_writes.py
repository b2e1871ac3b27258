"""Tensors in objects beside the module that a step writes in place: the numbers of one process, trial runs or not."""

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

from lightning_smddp.pipeline.capture.foreign_writes import ForeignWrites, NewWrites
from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net

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
    """Shows in a hook what its steps have written; those called so begin in the second epoch."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.stats, self.bank = Stats(), torch.zeros(2**16 + 1)

    def writes(self) -> bool:
        return not self.late or self.current_epoch >= 1

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += [*self.stats.sums(), *self.trainer.callbacks[0].stats.sums(), float(self.bank.sum())]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        early = self.net[0](batch[0])
        out = self.net[1:](early)
        if self.writes():
            self.write(batch, early.detach(), out.detach(), batch_idx)
        return F.cross_entropy(out, batch[1])

    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        pass


class OfModules(Writing):
    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        self.stats.total += early.sum()


class OfTheBatch(Writing):
    """Each stage would do that."""

    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        self.stats.total.data.add_(batch[0].sum())


class Global(Writing):
    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        torch.add(TOTALS, out.sum(), out=TOTALS)


class InViews(Writing):
    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        table = self.trainer.callbacks[0].stats.table
        table[batch_idx % 4] = early.mean(0)
        table.view(-1).index_add_(0, torch.tensor([1, 2]), out.sum().expand(2))


class LateOfModules(OfModules):
    late = True


class LateOfTheBatch(OfTheBatch):
    late = True


class LateGlobal(Global):
    late = True


class LateBank(Writing):
    """An attribute of the module that is too large to look whether it has changed."""

    late = True

    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        self.bank += out.mean()


class Harmless(Writing):
    """Writes what it has made itself, in other lines than before."""

    late = True

    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        out.clone().view(-1)[0] = 1.0
        torch.zeros(3).add_(batch[0].sum()).clamp_(max=0.0)


class Validated(Writing):
    """Its training step writes nothing."""

    def write(self, batch: list[Tensor], early: Tensor, out: Tensor, batch_idx: int) -> None:
        pass

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self.net(batch[0])
        if self.writes():
            self.stats.total += out.sum()

    val_dataloader = Writing.train_dataloader

    def on_validation_epoch_end(self) -> None:
        self.losses += self.stats.sums()


class LateValidated(Validated):
    late = True


def written(bench: Bench, model: type[Writing], expected: str, **options: Any) -> Any:
    """What was trained; on the first rank with a warning about a step that has ``expected`` in it, if any."""
    TOTALS.zero_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bench.fit(model(), max_epochs=2, num_sanity_val_steps=0, callbacks=[Queue()], **options)
    found = [str(warning.message) for warning in caught if "_step` runs" in str(warning.message)]
    found += [str(warning.message) for warning in caught if "training step is run" in str(warning.message)]
    first = bench.pipeline is not None and dist.get_rank() == 0
    assert [expected in text for text in found] == [True] * (first and bool(expected)), found
    return result


WRITES = "writes a tensor in place at"
CASES = {
    "of the batch": functools.partial(written, model=OfTheBatch, expected=WRITES),
    "global": functools.partial(written, model=Global, expected=WRITES),
    "in views": functools.partial(written, model=InViews, expected=WRITES),
    "late, of modules": functools.partial(written, model=LateOfModules, expected=WRITES, accumulate_grad_batches=2),
    "late, large": functools.partial(written, model=LateBank, expected="has begun to keep tensors in self.bank"),
    "harmless, accumulated": functools.partial(written, model=Harmless, expected="", accumulate_grad_batches=2),
    "late, validation": functools.partial(written, model=LateValidated, expected=WRITES),
}
MORE_CASES = {
    "of modules": functools.partial(written, model=OfModules, expected=WRITES),
    "late, of the batch": functools.partial(written, model=LateOfTheBatch, expected=WRITES),
    "late, global": functools.partial(written, model=LateGlobal, expected=WRITES),
    "harmless": functools.partial(written, model=Harmless, expected=""),
    "validation": functools.partial(written, model=Validated, expected=WRITES),
}
TWO, MORE = Matrix(list(CASES.values())), Matrix(list(MORE_CASES.values()))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES.values(), ids=list(MORE_CASES))
def test_more_equal_one_process(case: Case) -> None:
    MORE.compare(case)


# ---- what is noted ---------------------------------------------------------------------------------------------------


def test_what_was_there_is_put_back() -> None:
    kept, foreign = torch.arange(4.0), ForeignWrites()
    foreign.note(kept[2:])
    kept.mul_(2)
    foreign.note(kept)  # what was before the first write counts
    made = torch.ones(2)
    foreign.note(made)
    made.zero_()
    del made
    (place,) = foreign.locations()
    assert "test_foreign_writes.py" in place
    foreign.put_back()
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert foreign.locations() == []


def test_new_lines_are_known_if_nothing_that_they_write_is_kept() -> None:
    writes, kept = NewWrites(), torch.zeros(1)

    def write(tensor: Tensor) -> None:
        writes.look([tensor], lambda _: False)
        tensor.add_(1)

    for expected in ([1], [1]):
        writes.index = 1
        write(kept)
        assert list(writes.found()) == expected
        writes.put_back()
        assert kept.item() == 0.0
    for tensor in (None, kept):  # the same lines
        write(torch.zeros(1) if tensor is None else tensor)
        assert writes.found() == {}


def test_copies_that_stand_in_for_attributes_are_followed() -> None:
    writes, kept = NewWrites(), torch.zeros(1)
    writes.look([kept], lambda tensor: tensor is kept)
    assert writes.found() == {}


class Keeps(torch.nn.Module):
    """A layer that begins to sum up its input in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on, self.total = False, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on:
            self.total += x.detach().sum()
        return torch.tanh(x)


class KeepsLate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = Keeps()

    def on_train_epoch_start(self) -> None:
        self.net[1].is_on = self.current_epoch > 0


def warnings_of_late_writes() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Bench({}, "").fit(KeepsLate(), max_epochs=2)
    return [str(warning.message) for warning in caught if "is written in place since" in str(warning.message)]


def test_what_a_layer_begins_to_write_in_mid_training_is_named() -> None:
    messages = [message for messages in run_trainer_ranks(warnings_of_late_writes, 2) for message in messages]
    assert len(messages) == 1  # once, on the rank that has the layer
    assert "The tensor `self.net.1.total` is written in place since this batch" in messages[0]
