"""A step that changes in mid-training where batches count already: several replicas. It fits, or ends with a cure."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Matrix, Net
from tests.strategies.test_late_numbers import Asking
from tests.strategies.test_late_tails import SOMETHING_ELSE

REPLICAS = {"pipeline_parallel_size": 2}


class Half(Net):
    """One process takes batches of 8, each of two replicas 4 of these."""

    def setup(self, stage: str) -> None:
        if self.trainer.world_size > 1:
            self.batch_size = 4

    def train_dataloader(self) -> Any:
        data, kwargs = samples(self.count), self.trainer.distributed_sampler_kwargs
        sampler: Any = DistributedSampler(data, shuffle=False, **kwargs) if kwargs else None  # Lightning's shuffles
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)


class Odd(Half):
    """In the second epoch every other batch has a part that shows in gradients alone: rows far from each other."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        if self.current_epoch and batch_idx % 2 == 0:
            loss = loss - 1e-4 * out.mean(1).std(correction=0)
        return loss


class OddMean(Half):
    """The same with a mean over rows."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        if self.current_epoch and batch_idx % 2 == 0:
            loss = loss + 0.1 * out.pow(2).mean()
        return loss


class Hidden(Half):
    """A module that asks something else for the weight of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Asking({"beta": 0.0})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last.settings["beta"] = 0.1 * (self.global_step >= 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.last(self.net(batch[0]), batch[1])


def refused(bench: Bench) -> str:
    with pytest.raises(RuntimeError) as caught:
        bench.fit(Odd(), {**REPLICAS, "num_microbatches": "auto"}, max_epochs=2)
    return str(caught.value)


def hidden(bench: Bench) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bench.fit(Hidden(), REPLICAS, max_epochs=2)
    return [str(warning.message) for warning in caught if "the loss is another than" in str(warning.message)]


def fitting(bench: Bench, **options: Any) -> Any:
    return bench.fit(OddMean(), REPLICAS, max_epochs=2, **options)


ACCUMULATED = functools.partial(fitting, accumulate_grad_batches=2)
FOUR, MORE = Matrix([ACCUMULATED, hidden, refused], 4), Matrix([fitting], 4)


@pytest.mark.slow
def test_a_part_that_shows_in_gradients_alone_ends_the_run() -> None:
    messages = FOUR.results(refused)
    assert any(SOMETHING_ELSE in message and "of its size" in message for message in messages)
    assert any("`ckpt_path`" in message for message in messages)


@pytest.mark.slow
def test_all_replicas_go_on_alike() -> None:
    first, *others = FOUR.results(hidden)
    assert len(first) == 1
    assert "From here on each batch runs as one micro-batch" in first[0]
    assert not any(others)


@pytest.mark.slow
def test_equals_one_process() -> None:
    FOUR.compare(ACCUMULATED)


@pytest.mark.exhaustive
def test_equals_one_process_in_each_batch() -> None:
    MORE.compare(fitting)
