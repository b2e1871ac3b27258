"""The start's table says what a fused optimizer would save, where it is not used."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_smddp.strategies import fused_optimizers
from lightning_smddp.strategies.fused_optimizers import fused_advice
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import CLASSES, INPUTS, Learner, make_trainer, silent


def advice_for(module: nn.Module, optimizer: Any) -> list[str]:
    return fused_advice(module, [(optimizer, list(module.parameters()))])


def test_measured_on_a_bounded_copy_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_optimizers, "_MOST", 300_000)
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512))
    optimizer = optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    before = [p.detach().clone() for p in module.parameters()]
    threads = torch.get_num_threads()
    (text,) = advice_for(module, optimizer)
    assert text.startswith("AdamW(..., fused=True) would take ")
    assert text.endswith("tried on 0.3 of 0.79 M elements)")
    fused, plain = (float(part.split()[-1]) for part in text.split(" ms")[:2])
    assert fused < plain
    assert torch.get_num_threads() == threads
    assert not optimizer.state
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(module.parameters(), before, strict=True))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 500, sparse=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, fused=True),
        lambda p: optim.AdamW(p, fused=False),
        lambda p: optim.AdamW(p, foreach=True),
        lambda p: type("Own", (optim.AdamW,), {})(p),
        optim.RMSprop,
    ],
)
def test_silent_where_it_is_chosen_or_there_is_none(make: Any) -> None:
    module = nn.Linear(1000, 1000)
    assert advice_for(module, make(module.parameters())) == []


def test_silent_where_gradients_are_sparse_and_where_nothing_is_gained() -> None:
    sparse, small = Sparse(), nn.Linear(8, 3)
    assert advice_for(sparse, optim.SGD(sparse.parameters(), lr=0.1)) == []
    assert advice_for(small, optim.AdamW(small.parameters())) == []


class Wide(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(INPUTS, 90_000), nn.Linear(90_000, CLASSES))

    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters(), lr=0.01)


def printed(shard: str | None) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        make_trainer(silent(verbose=True, shard=shard), max_steps=1).fit(Wide())
    return " ".join(out.getvalue().replace("│", " ").split())


@pytest.mark.parametrize(("shard", "elements"), [(None, "1.1 of 1.1"), ("optimizer", "0.54 of 0.54")])
def test_in_the_table_with_and_without_shares(shard: str | None, elements: str) -> None:
    first, second = run_trainer_ranks(printed, 2, shard)
    assert "advice AdamW(..., fused=True) would take" in first
    assert f"tried on {elements} M elements)" in first
    assert second == ""
