"""What steps leave in attributes of the LightningModule, for hooks to read."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, name_of

pytestmark = pytest.mark.slow


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


def fit(bench: Bench, module: str) -> Any:
    """Without the sanity check, which comes before there are stages and runs whole batches."""
    return bench.fit(globals()[module](), max_epochs=1, num_sanity_val_steps=0)


CASES: list[Case] = [functools.partial(fit, module="OwnAttributes")]
TWO = Matrix(CASES)
INTERLEAVED = Matrix(CASES, pipeline={"schedule": "interleaved_1f1b", "stages_per_rank": 2})


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("matrix", [TWO, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_hooks_read_what_a_step_has_left(matrix: Matrix, case: Case) -> None:
    matrix.compare(case)
