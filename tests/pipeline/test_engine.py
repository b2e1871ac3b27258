"""A pipeline's step gives what one process gives, under every schedule and for any shapes."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.pipeline.runtime.remote import TensorSpec
from lightning_smddp.pipeline.runtime.schedules import SCHEDULES, parse
from lightning_smddp.pipeline.runtime.spans import Span, SpanRecorder
from tests.pipeline import pipeline_chains
from tests.pipeline.pipeline_chains import CPU, HIDDEN, Engine, two_stages
from tests.ranks import RanksFailedError, run_ranks

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
    "three stages": (2, [("looped_bfs", 3, FEW_STEPS), ("interleaved_zero_bubble", 3, FEW_STEPS)]),
    "frozen stages": (2, FROZEN),
    "four ranks": (4, [(name, DEFAULTS[name], FEW_STEPS) for name in ON_FOUR]),
    "more on four": (4, [(name, DEFAULTS[name], FEW_STEPS) for name in SCHEDULES if name not in ON_FOUR]),
}
MARKS = {
    "three stages": [pytest.mark.slow],
    "frozen stages": [pytest.mark.slow],
    "four ranks": [pytest.mark.slow],
    "more on four": [pytest.mark.exhaustive],
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, [])) for case in CASES])
def test_ranks_equal_one_process(case: str) -> None:
    ranks, runs = CASES[case]
    for found in run_ranks(several, ranks, runs, timeout=100):
        assert found == []


def gradient_that_does_not_matter(name: str) -> float:
    """The last stage uses what it received without its gradient."""
    bodies = two_stages(last=lambda microbatch, hidden: (bodies[1].module(hidden.detach()).sum(),))
    Engine(name, bodies).train([[[HIDDEN]]] * 2)
    gradient = bodies[dist.get_rank()].module.weight.grad
    return float(gradient.abs().sum())


def empty_and_absent_tensors(name: str) -> list[Any]:
    """Boundaries of no tensor at all, and of a tensor without elements."""
    empty = TensorSpec((0, 3), torch.float32, True)
    weight = nn.Parameter(torch.ones(3))
    bodies = two_stages(
        first=lambda microbatch: () if microbatch == 0 else (weight.expand(0, 3),),
        last=lambda microbatch, *received: (bodies[1].module(torch.cat([*received, torch.ones(1, 3)])).sum(),),
    )
    engine = Engine(name, bodies)
    losses = engine.train([[[]], [[empty]]])
    engine.evaluate([[[]], [[empty]]])
    return [loss.item() for loss in losses]


def without_loss(name: str) -> list[float]:
    """The second of three micro-batches has no loss; what the gradients lack against those of the other two."""
    bodies = two_stages()
    full = bodies[1].function
    bodies[1].function = lambda microbatch, hidden: () if microbatch == 1 else full(microbatch, hidden)
    Engine(name, bodies).train([[[HIDDEN]]] * 3)
    layers = [body.module for body in bodies]
    loss = sum(full(microbatch, *bodies[0](microbatch, ()))[0] for microbatch in (0, 2))
    wanted = torch.autograd.grad(loss, list(layers[dist.get_rank()].parameters()))
    ours = [parameter.grad for parameter in layers[dist.get_rank()].parameters()]
    return [float((mine - other).abs().max()) for mine, other in zip(ours, wanted, strict=True)]


def little(names: list[str]) -> dict[str, tuple[float, list[Any], list[float]]]:
    checks = (gradient_that_does_not_matter, empty_and_absent_tensors, without_loss)
    return {name: tuple(check(name) for check in checks) for name in names}


@pytest.mark.slow
def test_boundaries_that_carry_little_and_microbatches_without_loss() -> None:
    first, last = run_ranks(little, 2, ["gpipe", "1f1b", "interleaved_zero_bubble"])
    for name in first:
        (unused, losses, errors), (last_unused, last_losses, last_errors) = first[name], last[name]
        assert unused == 0 < last_unused, name
        assert (len(losses), len(last_losses)) == (0, 2), name
        assert max(errors + last_errors) < 1e-6, name


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


class UserError(Exception):
    pass


def failing(name: str, rank: int, in_backward: bool) -> str:
    """The error of the user; what the step had begun is let go of."""
    graphs: weakref.WeakSet[Token] = weakref.WeakSet()

    def fail(*_: Any) -> None:
        raise UserError("the user's own")

    def broken(microbatch: int, *received: Tensor) -> tuple[Tensor, ...]:
        outputs = healthy(microbatch, *received)
        if microbatch == 1:
            outputs[0].register_hook(fail) if in_backward else fail()
        graphs.add(token := Token())
        return (Held.apply(outputs[0], token),)

    bodies = two_stages()
    healthy = bodies[rank].function
    bodies[rank].function = broken
    engine = Engine(name, bodies)
    try:
        engine.train([[[HIDDEN]]] * 2)
    except UserError as error:
        message = str(error)
    assert len(graphs) == 0
    if dist.get_world_size() == 1:  # an engine of one rank can go on
        bodies[rank].function = healthy
        assert len(engine.train([[[HIDDEN]]] * 2)) == 2
    return message


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_an_error_in_a_body_comes_out_as_it_is(in_backward: bool) -> None:
    assert run_ranks(failing, 1, "interleaved_zero_bubble", 1, in_backward) == ["the user's own"]
    for name in ("gpipe", "1f1b", "looped_bfs"):
        with pytest.raises(RanksFailedError) as failed:
            run_ranks(failing, 2, name, 1, in_backward)
        # The rank with the error returned; its peer found the connection closed.
        assert list(failed.value.tracebacks) == [0]
        assert not failed.value.hung


def modes() -> list[bool]:
    bodies = two_stages()
    seen = []
    whole = bodies[1].function

    def note(microbatch: int, hidden: Tensor) -> tuple[Tensor, ...]:
        seen.append(torch.is_grad_enabled())
        return whole(microbatch, hidden)

    bodies[1].function = note
    engine = Engine("looped_bfs", bodies)
    engine.evaluate([[[HIDDEN]]])
    with torch.no_grad():
        engine.train([[[HIDDEN]]])
    return [*seen, all(parameter.grad is not None for body in bodies for parameter in body.module.parameters())]


def test_only_training_computes_gradients_whatever_the_caller_has_set() -> None:
    assert run_ranks(modes, 1) == [[False, True, True]]


def hook_calls(name: str) -> int:
    stages_per_rank = parse(name).default_stages_per_rank
    model = pipeline_chains.network(2 * stages_per_rank)
    batches = pipeline_chains.batches_of(0, (1, 1, 1, 1), 3)
    _, boundaries = pipeline_chains.in_one_process(model, batches, training=False)
    fired = []
    parameter = model[-1 if name != "1f1b" else dist.get_rank()].linear.weight
    parameter.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    Engine(name, [pipeline_chains.Body(piece, batches) for piece in model]).train(boundaries)
    return len(fired)


@pytest.mark.parametrize("name", ["1f1b", "zbv_zero_bubble"])
def test_hooks_on_parameters_fire_once_per_micro_batch_also_where_backward_is_split(name: str) -> None:
    assert run_ranks(hook_calls, 2, name)[0] == 4


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
    assert run_ranks(kept, 2, "1f1b", 6) == [(2, 0, 0), (1, 0, 0)]
    assert run_ranks(kept, 2, "gpipe", 6) == [(6, 0, 0), (6, 0, 0)]
    assert run_ranks(kept, 1, "interleaved_zero_bubble", 6)[0][1:] == (0, 0)


# ---- spans show what each rank did when, and when it had to wait ----


def recorded(name: str) -> list[Span]:
    bodies = two_stages()
    slow, healthy = dist.get_world_size() - 1, bodies[-1].function

    def sleep_first(*arguments: Any) -> tuple[Tensor, ...]:
        time.sleep(0.1)
        return healthy(*arguments)

    bodies[slow].function = sleep_first
    recorder = SpanRecorder(dist.get_rank(), CPU)
    engine = Engine(name, bodies, recorder=recorder)
    start = time.perf_counter()
    engine.train([[[HIDDEN]]] * 2)
    engine.evaluate([[[HIDDEN]]])
    spans = recorder.take()
    assert recorder.take() == []
    assert spans[0].start_s >= start
    assert spans[-1].end_s <= time.perf_counter()
    return spans


def test_spans_tell_what_each_rank_did_and_for_whom_it_waited() -> None:
    first, last = run_ranks(recorded, 2, "gpipe")
    for rank, spans in enumerate((first, last)):
        work = [(span.kind, span.microbatch) for span in spans if span.kind not in ("wait", "send")]
        assert work == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1), ("forward", 0)]
        assert {(span.rank, span.stage) for span in spans} == {(rank, rank)}
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.end_s <= after.start_s or before.end_s == pytest.approx(after.start_s)
            assert before.start_s <= before.end_s
    seconds: Counter[tuple[int, str]] = Counter()
    for span in (*first, *last):
        seconds[span.rank, span.kind] += span.end_s - span.start_s
    assert seconds[1, "forward"] >= 0.3
    assert seconds[0, "wait"] > 0.15  # for the last rank's two forwards before its first backward
    assert seconds[0, "forward"] < 0.25


def split_kinds() -> set[str]:
    recorder = SpanRecorder(0, CPU)
    Engine("interleaved_zero_bubble", two_stages(), recorder=recorder).train([[[HIDDEN]]] * 2)
    return {span.kind for span in recorder.take()}


def test_spans_of_split_backwards() -> None:
    assert run_ranks(split_kinds, 1) == [{"forward", "backward_input", "backward_weight", "wait", "send"}]
