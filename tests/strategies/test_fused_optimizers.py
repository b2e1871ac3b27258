"""The start's table advises a fused optimizer where it is not used."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from torch import nn, optim

from lightning_smddp.strategies.ddp import _could_be_fused
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, make_trainer, silent


@pytest.mark.parametrize(
    ("make", "could"),
    [
        (optim.AdamW, True),
        (lambda p: optim.AdamW(p, fused=True), False),
        (lambda p: optim.AdamW(p, fused=False), False),
        (lambda p: optim.AdamW(p, foreach=True), False),
        (lambda p: type("Own", (optim.AdamW,), {})(p), False),
        (optim.RMSprop, False),
    ],
)
def test_silent_where_it_is_chosen_or_there_is_none(make: Any, could: bool) -> None:
    assert _could_be_fused(make(nn.Linear(10, 10).parameters())) is could


class Plain(Learner):
    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters(), lr=0.01)


class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 5, sparse=True).requires_grad_(False)


def printed(make: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        make_trainer(silent(verbose=True), max_steps=1).fit(make())
    return " ".join(out.getvalue().replace("│", " ").split())


def both() -> tuple[str, str]:
    return printed(Plain), printed(Sparse)


def test_in_the_table_of_the_first_rank() -> None:
    (plain, sparse), second = run_trainer_ranks(both, 2)
    assert "advice AdamW(..., fused=True) passes over memory once a step" in plain
    assert "fused" not in sparse
    assert second == ("", "")
