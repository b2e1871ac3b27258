"""The whole step on one rank: what the pipeline has to agree with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.graph import Node, StepGraph
from lightning_smddp.pipeline.capture.own_seeds import seed_torch
from lightning_smddp.pipeline.capture.tracer import Step
from lightning_smddp.pipeline.partition.costs import LossIn
from lightning_smddp.pipeline.partition.live_sets import live_sets
from lightning_smddp.pipeline.partition.verify import norm_of
from lightning_smddp.pipeline.runtime.remote import Shapes
from lightning_smddp.pipeline.runtime.replay import Observers, Replay, patched_units
from lightning_smddp.pipeline.runtime.stage_graph import StagePlan


@dataclass
class Reference:
    """One micro-batch's loss, the norm of each parameter's gradient, .

    ``plain_loss`` and ``plain_norms`` are those of the step as the user wrote it, not replayed; ``again_loss`` and
    ``again_norms`` of a replay with the same random numbers.
    ``of_trace``: it is the micro-batch that was traced, as the other one takes another course.
    """

    loss: float
    norms: dict[str, float] = field(default_factory=dict)
    plain_loss: float = float("nan")
    plain_norms: dict[str, float] = field(default_factory=dict)
    again_loss: float = float("nan")
    again_norms: dict[str, float] = field(default_factory=dict)
    of_trace: bool = False


def run_reference(
    graph: StepGraph,
    step: Step,
    loss_of: LossIn,
    root: nn.Module,
    device: torch.device,
    seed: int,
    own_numbers: bool = True,
) -> Reference:
    """Run the step, units patched, in one stage: forward, and backward if it has a loss. Gradients are not kept.

    Each node starts from its own random numbers, as in :func:`seeding`, so that other ranks can draw the same; without
    ``own_numbers`` it goes on with those that the nodes before it have left, as in :func:`run_plain`.
    """
    # One stage that has all nodes: nothing is received, and nothing is sent.
    live, again = live_sets(graph, [])
    assert not live
    plan = StagePlan(0, 0, len(graph.nodes), again[0], (), ())
    replay = Replay(graph, plan, root, device)
    observer = None
    if own_numbers:
        observer = seeding(seed)
    else:
        replay.python_random = None  # what units draw in Python, too
    seed_torch(seed)

    def replayed() -> Any:
        with patched_units(root, graph.units):
            _, result = replay.run(step, (), Shapes.of(graph), Observers(observer))
        return result

    loss, norms = _backward(replayed, loss_of, root)
    return Reference(loss, norms)


def run_plain(
    step: Step,
    loss_of: LossIn,
    root: nn.Module,
    seed: int,
) -> tuple[float, dict[str, float]]:
    """The same of the step as it is, with nothing patched: what a replay may change shows by it."""
    seed_torch(seed)
    return _backward(step, loss_of, root)


def _backward(
    step: Step,
    loss_of: LossIn,
    root: nn.Module,
) -> tuple[float, dict[str, float]]:
    """Forward, and backward if there is a loss: the loss, and norms of gradients."""
    norms: dict[str, float] = {}
    handles = []
    for name, parameter in root.named_parameters():
        if parameter.requires_grad and not parameter.is_meta:
            handles.append(parameter.register_post_accumulate_grad_hook(_note_norm(name, norms)))
    try:
        loss = loss_of(step())
        if loss is not None and loss.requires_grad:
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    if loss is None:
        return math.nan, norms
    return float(loss.detach()), norms


def seeding(seed: int) -> Callable[[Node, bool, Any], None]:
    """Observer that gives each node random numbers of its own, whatever ran before it."""

    def observe(node: Node, ends: bool, result: Any) -> None:
        if not ends:
            seed_torch(seed + node.index)

    return observe


def _note_norm(name: str, norms: dict[str, float]) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms[name] = norm_of(parameter.grad)
        parameter.grad = None  # the whole model's gradients may be too much for one rank

    return note
