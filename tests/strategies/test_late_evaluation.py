"""A validation or test step that shows something else in mid-training, behind its last module."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, outcome

WHOLE = "`validation_step` runs each batch as one micro-batch"


class Validating(Evaluated):
    """Logs each epoch's values for itself, so that all can be compared."""

    def __init__(self) -> None:
        super().__init__(batch_size=8, count=24)
        self.seen: list[tuple[str, float]] = []

    def shown(self, out: Tensor, target: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_dict(self.shown(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.seen += [(name, float(value)) for name, value in self.trainer.callback_metrics.items()]


class Totals(Validating):
    """A total from the second epoch on."""

    def shown(self, out: Tensor, target: Tensor) -> dict[str, Tensor]:
        found = {"val_loss": F.cross_entropy(out, target)}
        if self.current_epoch >= 1:
            found["total"] = out.abs().sum()
        return found


class Spread(Validating):
    """From the second epoch on what no rule makes of micro-batches'."""

    def shown(self, out: Tensor, target: Tensor) -> dict[str, Tensor]:
        found = {"val_loss": F.cross_entropy(out, target)}
        if self.current_epoch >= 1:
            found["spread"] = out[:, 0].std(correction=0)
        return found


class OtherMeaning(Validating):
    """A mean that is a total from the second epoch on, under the same name."""

    def shown(self, out: Tensor, target: Tensor) -> dict[str, Tensor]:
        size = out.abs()
        return {"size": size.sum() if self.current_epoch >= 1 else size.mean()}


class Annealed(Validating):
    """A sum beside a mean, with a weight that grows from zero."""

    def shown(self, out: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"objective": F.cross_entropy(out, target) + 0.1 * self.current_epoch * out.pow(2).sum()}


class Harmless(Validating):
    """A mean more, in some batches."""

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(out, batch[1]))
        if self.current_epoch >= 1 and batch_idx == 2:
            self.log("size", out.abs().mean())


def told(bench: Bench, model: type[Validating], expected: str) -> Any:
    """What was seen; with a warning on the first rank that has ``expected`` in it, if any."""
    trained, trainer = model(), bench.trainer(max_epochs=3, num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(trained)
    found = [str(warning.message) for warning in caught if "_step`" in str(warning.message)]
    first = bench.pipeline is not None and dist.get_rank() == 0
    assert [expected in text for text in found] == [True] * (first and bool(expected)), found
    return outcome(trained, trainer, seen=trained.seen)


CASES = {
    "totals": functools.partial(told, model=Totals, expected=""),
    "spread": functools.partial(told, model=Spread, expected=WHOLE),
    "other meaning": functools.partial(told, model=OtherMeaning, expected=WHOLE),
    "annealed": functools.partial(told, model=Annealed, expected=WHOLE),
    "harmless": functools.partial(told, model=Harmless, expected=""),
}
TWO = Matrix(list(CASES.values()))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)
