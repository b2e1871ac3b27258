"""What ``smddp_fsdp`` refuses, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging
from torch import nn

from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.sharding.test_fsdp import fully_sharded
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


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sparse gradients": (Sparse, {}, "words has sparse gradients"),
    "a gradient of gradients": (Penalized, {}, "sharding='grad_op'"),
    "pruning": (Learner, {"callbacks": [ModelPruning("l1_unstructured", amount=0.1)]}, "replaces parameters"),
    "an early optimizer": (OwnOptimizer, {}, "it would train nothing"),
    "a hook": (Hooked, {}, "net.0.weight has a hook of its own"),
    "two dtypes": (Mixed, {}, "one is torch.float32, other is torch.float64"),
    "an old object": (Stale, {}, "meta"),
}


def fit_penalized() -> tuple[Any, Any]:
    return tuple(fit(strategy, Penalized()) for strategy in (silent(), fully_sharded(sharding="grad_op")))


def test_gradients_of_gradients_where_parameters_stay_whole():
    for expected, actual in run_trainer_ranks(fit_penalized, 2):
        assert_equal(actual, expected, tolerance=1e-5)


def fit_averaged(strategy_options: Any) -> None:
    make_trainer(fully_sharded(**strategy_options), callbacks=[WeightAveraging()]).fit(Learner())


@pytest.mark.parametrize(
    ("strategy_options", "message"),
    [({"meta_init": True}, "copies the module before its layers"), ({"sharded": True}, "Leave out sharded=True")],
)
def test_averages_have_to_be_of_a_whole_file_and_module(strategy_options, message):
    with pytest.raises(RanksFailedError, match=message) as failed:
        run_trainer_ranks(fit_averaged, 2, strategy_options)
    assert not failed.value.hung


def fit_wrong(case: str) -> None:
    make, options, _ = CASES[case]
    make_trainer(fully_sharded(), **options).fit(make())


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_refused_on_every_rank(case):
    with pytest.raises(RanksFailedError, match=CASES[case][2]) as failed:
        run_trainer_ranks(fit_wrong, 2, case)
    assert not failed.value.hung


def test_arguments():
    with pytest.raises(ValueError, match="sharding='zero' is unknown. Valid: 'full', 'grad_op', 'hybrid'"):
        fully_sharded(sharding="zero")
    with pytest.raises(ValueError, match="compression='int8' cannot .* Valid: None, 'bf16', 'fp16'; or use"):
        fully_sharded(compression="int8")
    with pytest.raises(TypeError, match="has no argument 'static_graph'. Valid: .*sharding"):
        fully_sharded(static_graph=True)
