"""A pipeline's step gives what one process gives, under every schedule and for any shapes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_smddp.pipeline.runtime.schedules import SCHEDULES
from tests.pipeline import pipeline_chains
from tests.pipeline.pipeline_chains import HIDDEN, Engine, two_stages
from tests.ranks import run_ranks

# Sizes differ within a step, lengths between steps; some numbers of micro-batches need a substitute schedule.
STEPS = [
    ("train", (3, 3, 2, 2), 4),
    ("evaluate", (3, 2, 2), 5),
    ("train", (2, 1, 1, 1, 1), 3),
    ("evaluate", (4,), 2),
    ("train", (4,), 4),
    ("train", (3, 3, 2, 2), 4),
]
FEW_STEPS = [("train", (2, 2, 1, 1, 1, 1, 1, 1), 3), ("evaluate", (3, 2), 5), ("train", (2, 2, 1), 4)]
SPLITTING = ["interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]  # whole backwards into two halves


def several(cases: list[tuple[Any, ...]]) -> list[str]:
    return [f"{case}: {text}" for case in cases for text in pipeline_chains.compare(*case)]


DEFAULTS = {name: SCHEDULES[name].default_stages_per_rank for name in SCHEDULES}
FROZEN = [("gpipe", 1, FEW_STEPS, [0]), ("1f1b", 1, FEW_STEPS, [0])]
FROZEN += [(name, 2, FEW_STEPS, frozen) for name in ("looped_bfs", *SPLITTING) for frozen in ([0, 1], [2])]
# Ranks between others receive and send; the other schedules run on two ranks.
ON_FOUR = ["1f1b", "interleaved_zero_bubble", "dualpipev"]
CASES: dict[str, tuple[int, list[tuple[Any, ...]]]] = {
    "two ranks": (2, [(name, count, STEPS) for name, count in DEFAULTS.items()]),
    "one rank": (1, [(name, count, STEPS) for name, count in DEFAULTS.items()]),
    "other stages": (1, [("interleaved_1f1b", 3, FEW_STEPS), ("interleaved_zero_bubble", 1, FEW_STEPS)]),
    "three stages, frozen stages": (
        2,
        [("looped_bfs", 3, FEW_STEPS), ("interleaved_zero_bubble", 3, FEW_STEPS), *FROZEN],
    ),
    "four ranks": (4, [(name, DEFAULTS[name], FEW_STEPS) for name in ON_FOUR]),
    "more on four": (4, [(name, DEFAULTS[name], FEW_STEPS) for name in SCHEDULES if name not in ON_FOUR]),
}
MARKS = {
    "three stages, frozen stages": [pytest.mark.slow],
    "four ranks": [pytest.mark.slow],
    "more on four": [pytest.mark.exhaustive],
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, [])) for case in CASES])
def test_ranks_equal_one_process(case: str) -> None:
    ranks, runs = CASES[case]
    for found in run_ranks(several, ranks, runs, timeout=100):
        assert found == []


def with_early_receives(*names: str) -> list[tuple[list[str], list[int]]]:
    return [early_receives_of(name) for name in names]


def early_receives_of(name: str) -> tuple[list[str], list[int]]:
    """The second micro-batch has no loss; differences, and micro-batches whose messages nobody has taken."""
    reference, batches = pipeline_chains.network(3), pipeline_chains.batches_of(0, (1,) * 5, 3)
    model, left = copy.deepcopy(reference), []
    bodies: list[pipeline_chains.StageBody] = [pipeline_chains.Body(piece, batches) for piece in model]
    last, without_loss = bodies[2], [(x, 0.0 if index == 1 else weight) for index, (x, weight) in enumerate(batches)]
    bodies[2] = lambda microbatch, received: last(microbatch, received)[: 0 if microbatch == 1 else 1]
    engine = Engine(name, bodies)
    (stage,) = engine.engine.stages
    end_step = stage.end_step
    assert stage._before._ahead

    def look_and_end() -> None:
        for neighbour in (stage._before, stage._behind):
            for held in (neighbour._arriving, neighbour._tensors):
                left.extend(microbatch for microbatch, some in held.items() if some)
        end_step()

    stage.end_step = look_and_end
    for train in (True, False, True, False, True):
        _, boundaries = pipeline_chains.in_one_process(reference, without_loss, train)
        (engine.train if train else engine.evaluate)(boundaries)
    return pipeline_chains.differences(engine, model, reference), left


def test_receives_that_are_started_early_are_all_taken() -> None:
    assert run_ranks(with_early_receives, 3, "gpipe", "1f1b") == [[([], [])] * 2] * 3


class Token:
    pass


class Held(torch.autograd.Function):
    """Lives in the graph of one micro-batch on one stage."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def all_kept(*names: str) -> list[tuple[int, int, int]]:
    return [kept(name, 6) for name in names]


def kept(name: str, microbatches: int) -> tuple[int, int, int]:
    """How many graphs a rank holds at most at once; graphs and received tensors that are left afterwards."""
    gc.disable()
    graphs: weakref.WeakSet[Token] = weakref.WeakSet()
    tensors: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def watched(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def call(microbatch: int, *received: Tensor) -> tuple[Tensor, ...]:
            nonlocal most
            token = Token()
            (output,) = function(microbatch, *received)
            graphs.add(token)
            tensors.update(received)
            most = max(most, len(graphs))
            return (Held.apply(output, token),)

        return call

    bodies = two_stages()
    for body in bodies:
        body.function = watched(body.function)
    engine = Engine(name, bodies)
    for _ in range(3):
        engine.train([[[HIDDEN]]] * microbatches)
    return most, len(graphs), len(tensors)


@pytest.mark.slow
def test_nothing_is_held_longer_than_the_schedule_needs() -> None:
    assert run_ranks(all_kept, 2, "1f1b", "gpipe") == [[(2, 0, 0), (6, 0, 0)], [(1, 0, 0), (6, 0, 0)]]
    assert run_ranks(kept, 1, "interleaved_zero_bubble", 6)[0][1:] == (0, 0)
