"""What ``shard="optimizer"`` and ``smddp_fsdp`` refuse, on every rank; and what they do where they could have."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelPruning, WeightAveraging
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn

from tests.ranks import run_trainer_ranks
from tests.sharding.learners import AllAtOnce, Zero, fully_sharded, sharded
from tests.strategies.learners import Learner, assert_equal, fit, make_trainer, silent


class OwnOptimizer(Learner):
    """Made before the module is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.made


class Hooked(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient)


class Mixed(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(2))
        self.other = nn.Parameter(torch.zeros(2, dtype=torch.float64))


class Stale(Learner):
    """Has a parameter in a list of its own, by which it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.net[0].weight]

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self.kept[0].square().sum()


class Sparse(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)


class Penalized(Learner):
    """Differentiates twice, as a gradient penalty does."""

    def loss(self, batch: Any) -> Any:
        inputs = batch[0].detach().requires_grad_()
        outputs = self.net(inputs)
        (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        return super().loss(batch) + gradient.square().mean()


class OtherProfiler(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.profiler = PassThroughProfiler()


# Strategy and its options, module, callbacks, message.
CASES: list[tuple[Any, dict[str, Any], Any, list[Any], str]] = [
    (sharded, {}, AllAtOnce, [], "cannot shard LBFGS: its step needs all parameters and gradients at once"),
    (sharded, {}, Zero, [], "ZeroRedundancyOptimizer and shard='optimizer' both shard the optimizer"),
    (fully_sharded, {}, Sparse, [], "words has sparse gradients"),
    (fully_sharded, {}, Penalized, [], "storage of size 0"),
    (fully_sharded, {}, Learner, [ModelPruning("l1_unstructured", amount=0.1)], "replaces parameters"),
    (fully_sharded, {}, OwnOptimizer, [], "it would train nothing"),
    (fully_sharded, {}, Hooked, [], "net.0.weight has a hook of its own"),
    (fully_sharded, {}, Mixed, [], "FSDP expects uniform original parameter dtype"),
    (fully_sharded, {}, Stale, [], "meta"),
    (fully_sharded, {}, Learner, [OtherProfiler()], "trainer.profiler was replaced"),
    (fully_sharded, {"meta_init": True}, Learner, [WeightAveraging()], "copies the module before meta_init=True gives"),
    (fully_sharded, {"sharded": True}, Learner, [WeightAveraging()], "which sharded=True saves as shares"),
]


def fit_each() -> tuple[list[str], list[Any]]:
    """What each is told; gradients of gradients where parameters stay whole, and without sharding."""
    said = []
    for strategy, options, make, callbacks, _ in CASES:
        with pytest.raises((ValueError, RuntimeError, TypeError, AssertionError)) as caught:
            make_trainer(strategy(**options), callbacks=callbacks).fit(make())
        said.append(str(caught.value))
    return said, [fit(strategy, Penalized()) for strategy in (silent(), fully_sharded(sharding="grad_op"))]


def test_what_cannot_be_is_an_error_on_every_rank_and_what_can_be_has_the_numbers_of_smddp() -> None:
    for said, (expected_outcome, actual) in run_trainer_ranks(fit_each, 2):
        assert_equal(actual, expected_outcome, tolerance=1e-5)
        for message, (*_, expected) in zip(said, CASES, strict=True):
            assert re.search(expected, message), message


def test_arguments() -> None:
    with pytest.raises(ValueError, match="sharding='zero' is unknown. Valid: 'full', 'grad_op', 'hybrid'"):
        fully_sharded(sharding="zero")
    with pytest.raises(ValueError, match="compression='int8' is unknown. Valid: None, 'bf16', 'fp16'"):
        fully_sharded(compression="int8")
    with pytest.raises(TypeError, match="has no argument 'static_graph'. Valid: .*sharding"):
        fully_sharded(static_graph=True)
