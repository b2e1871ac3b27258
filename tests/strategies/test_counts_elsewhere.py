"""Integers that steps move in helpers, callbacks, submodules and dicts, also where the first batches move none."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smddp.bridge.owner_watch import OwnerWatch, owner_in_words
from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, assert_same, name_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what is said is looked at below


class Stats:
    """A helper of the user's."""

    def __init__(self) -> None:
        self.hits, self.members = 0, {"hits": 0}


class Counts(Callback):
    def __init__(self) -> None:
        self.stats = Stats()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rare = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rare += int((x > 1.9).sum())
        return x


class Everywhere(Net):
    """Rare rows and hits, and calls from the second epoch on: in all places at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Sequential(self.net[1], Layer())
        self.stats, self.members = Stats(), {"rows": 0}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rare = int((batch[0][:, 0] > 1.2).sum())
        self.trainer.callbacks[0].stats.hits += rare  # each stage comes here
        logits = self.net(batch[0])
        self.stats.hits += rare
        self.stats.members["hits"] += int((logits.argmax(1) == batch[1]).sum()) if self.current_epoch else 0
        self.members["rows"] += len(batch[0]) if self.current_epoch else 0
        self.trainer.callbacks[0].stats.members["hits"] += self.current_epoch
        return F.cross_entropy(logits, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        for stats in (self.stats, self.trainer.callbacks[0].stats):
            self.losses += [stats.hits, stats.members["hits"]]
        self.losses += [self.members["rows"], self.net[1][1].rare]


class Lows(Net):
    """One at the most for a batch, which its micro-batches do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = Stats()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.stats.hits += int(loss < 1.05)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(self.stats.hits)


class ValidatedLows(Lows):
    training_step = Net.training_step

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        Lows.training_step(self, batch, batch_idx)

    val_dataloader = Net.train_dataloader

    def on_validation_epoch_end(self) -> None:
        self.losses.append(self.stats.hits)


def counted(bench: Bench, kind: type[Net], pipeline: Any = None, **options: Any) -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = bench.fit(kind(), pipeline, max_epochs=2, num_sanity_val_steps=0, callbacks=[Counts()], **options)
    return result, [str(warning.message) for warning in seen if "self.stats.hits is moved by" in str(warning.message)]


CASES: list[Case] = [
    functools.partial(counted, kind=Everywhere),
    functools.partial(counted, kind=Everywhere, pipeline={"num_microbatches": 2}, accumulate_grad_batches=2),
    functools.partial(counted, kind=Lows),
    functools.partial(counted, kind=ValidatedLows),
]
TWO = Matrix(CASES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Any) -> None:
    results = TWO.results(case)
    expected, _ = case(Bench(None))
    for result, _ in results:
        assert_same(result, expected)


def test_what_counts_neither_rows_nor_calls_is_said_once() -> None:
    for case, number in zip(CASES, (0, 0, 1, 1), strict=True):
        (_, said), _ = TWO.results(case)
        assert ["neither rows nor calls" in text for text in said] == [True] * number, said


def test_a_watch_sees_what_it_may_have_to_look_at() -> None:
    stats = Stats()
    stats.members["list"] = []
    changes = [
        lambda: setattr(stats, "hits", 1),
        lambda: setattr(stats, "other", 1),
        lambda: stats.members.update(hits=1),
        lambda: stats.members.update(other=1),
        lambda: stats.members["list"].append(1),
        lambda: delattr(stats, "members"),
    ]
    for change in changes:
        watch = OwnerWatch(stats, frozenset())
        assert not watch.is_touched()
        change()
        assert watch.is_touched()
    watch = OwnerWatch(stats, frozenset())
    stats.hits, stats.other = 5, torch.zeros(1)
    assert [(found.where, found.before, found.after) for found in watch.numbers()] == [(("hits",), 1, 5)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "self"),
        ("net.1", "self.net.1"),
        ("->stats.0", "self.stats"),
        ("net.1->parts.2", "self.net.1.parts[2]"),
        ("callback Counts 0->stats.0", "Counts.stats"),
    ],
)
def test_owners_in_words(name: str, words: str) -> None:
    assert owner_in_words(name) == words
