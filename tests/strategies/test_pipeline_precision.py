"""Mixed precision in a pipeline: the same training, and weights are cast once a step."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_smddp.bridge.step import may_keep_casts
from lightning_smddp.pipeline.capture.graph_builder import cast_type
from lightning_smddp.pipeline.capture.tracer import trace
from tests.pipeline.pipeline_chains import HIDDEN, Engine, two_stages
from tests.ranks import run_ranks, run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Net, assert_same

CASES: list[dict[str, Any]] = [
    {"schedule": "interleaved_zero_bubble", "stages_per_rank": 2},
    {"schedule": "1f1b", "activation_checkpointing": True},
]


class CountedCasts(TorchDispatchMode):
    """Counts copies of parameters in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.casts[id(args[0])] += 1
        return func(*args, **(kwargs or {}))


Counted = tuple[dict[str, Any], dict[str, int]]


def train_counted(cases: list[dict[str, Any]], precision: str = "bf16-mixed") -> list[Counted]:
    """For each case what training gave, and of each parameter that was cast how often, at the most, in a later step."""
    results = []
    for options in cases:
        trainer = Bench({"num_microbatches": 4, **options}).trainer(precision=precision)
        most, plain = Counter[int](), type(trainer.strategy).training_step

        def counted(*args: Any, trainer: Any = trainer, most: Any = most, plain: Any = plain) -> Any:
            with CountedCasts() as mode:
                result = plain(*args)
            if trainer.global_step > 1:  # behind the checks
                most |= mode.casts
            return result

        model = Net(layers=6)
        parameters = list(model.named_parameters())
        with mock.patch.object(type(trainer.strategy), "training_step", counted):
            trainer.fit(model)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        casts = {name: most[id(parameter)] for name, parameter in parameters if id(parameter) in most}
        results.append((weights, casts))
    return results


def assert_cast(of_ranks: list[dict[str, int]], casts: int) -> None:
    """Together the ranks cast all parameters, each on the rank of its stage and so often."""
    counts = Counter[str]()
    for found in of_ranks:
        counts.update(found)
    assert counts == dict.fromkeys(dict(Net(layers=6).named_parameters()), casts)


@pytest.mark.slow
def test_weights_are_cast_once_for_all_micro_batches() -> None:
    """With checkpoints, which keep no copies, each forward and each backward casts."""
    everyones = run_trainer_ranks(train_counted, 2, CASES)
    model = Net(layers=6)
    Bench().trainer(precision="bf16-mixed").fit(model)
    for case, casts in enumerate([1, 8]):
        assert_cast([results[case][1] for results in everyones], casts)
        for results in everyones:
            assert_same(results[case][0], dict(model.state_dict()), 2e-2)


class Steps(nn.Module):
    """Uses its layers as it is told."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.uses, self.first, self.second = uses, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses == "twice":
            x = self.first(x)
        if self.uses == "checkpoint":
            x = checkpoint(self.second, x, use_reentrant=False)
        another = torch.autocast("cpu", torch.float16, cache_enabled=False)
        with another if self.uses == "another type" else contextlib.nullcontext():
            return self.second(self.first(x))


def lent(root: nn.Module, name: str) -> torch.Tensor:
    return root.get_parameter(name).detach().clone()


@pytest.mark.parametrize(
    ("uses", "kind"), [("once", torch.bfloat16), ("twice", None), ("checkpoint", None), ("another type", torch.float16)]
)
def test_copies_are_kept_where_that_makes_no_difference(uses: str, kind: torch.dtype | None) -> None:
    root, cpu = Steps(uses), torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        found = cast_type(trace(lambda: root(torch.randn(2, 4)), root, cpu))
        assert found == kind
        if uses != "checkpoint":  # parameters that are lent by other ranks
            assert cast_type(trace(lambda: root(torch.randn(2, 4)), root, cpu, functools.partial(lent, root))) == kind
        assert may_keep_casts({found}, torch.device("cpu")) == (uses == "once")
    assert not may_keep_casts({found}, torch.device("cpu"))


class Copies(TorchDispatchMode):
    """Knows those copies in another type that somebody holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held = weakref.WeakSet[torch.Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.held.add(result)
        return result


def copies_held(microbatches: int) -> int:
    """Behind the micro-batches, within the context that keeps copies."""
    bodies = two_stages()
    layer = bodies[1].module

    def last(microbatch: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return (layer(hidden).float().square().mean(),)

    bodies[1].function = last
    with torch.autocast("cpu", enabled=False), Copies() as copies:
        Engine("1f1b", bodies).train([[[HIDDEN]]] * microbatches)
        gc.collect()
        return len(copies.held)


def test_copies_of_what_a_stage_receives_go_with_their_micro_batch() -> None:
    assert run_ranks(copies_held, 2, 6) == [0, 2]  # those of a weight and a bias
