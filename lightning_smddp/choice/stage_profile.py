"""The memory and time of each stage of a pipeline on one micro-batch, found by running one after the other here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_smddp._compat.torch_memory import MemoryRecord, recorded_memory
from lightning_smddp.choice.step_profile import StepProfile, dropped_gradients, profile_of, shortest
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.runtime.remote import Shapes
from lightning_smddp.pipeline.runtime.stage_program import StagePlan, StageProgram
from lightning_smddp.pipeline.runtime.step_run import run_stage
from lightning_smddp.pipeline.runtime.wrappers import Wrappers

_CPU = torch.device("cpu")
_Messages = tuple[Tensor, ...]


def profile_stages(
    graph: StepGraph,
    plans: Sequence[StagePlan],
    step: Callable[[], Any],
    loss_of: Callable[[Any], Tensor],
    root: nn.Module,
    checkpointing: bool,
) -> list[StepProfile]:
    """Each stage's forward and backward of the micro-batch that ``step`` runs on, without other ranks.

    What a stage receives comes from the one before; the gradients of what it sends are ones, which are as large as the
    right ones. Nothing of it stays.
    """
    profiles = []
    received: _Messages = ()
    wrappers = Wrappers(root, _CPU)
    with preserve_state(root, _CPU), dropped_gradients(root):
        for plan in plans:
            replay = StageProgram(graph, plan, wrappers, checkpointing)
            with recorded_memory() as record:
                _train(replay, step, loss_of, received, record)
            seconds = shortest(functools.partial(_train, replay, step, loss_of, received, None))
            sent = tuple(tensor.detach() for tensor in _forward(replay, step, loss_of, received))
            profile = replace(
                profile_of(record),
                seconds=seconds,
                received=_bytes(received),
                sent=_bytes(sent),
            )
            profiles.append(profile)
            received = sent
    return profiles


def _bytes(message: _Messages) -> int:
    return sum(tensor.nbytes for tensor in message)


def _train(
    replay: StageProgram,
    step: Callable[[], Any],
    loss_of: Callable[[Any], Tensor],
    received: _Messages,
    record: MemoryRecord | None,
) -> None:
    sent = _forward(replay, step, loss_of, received)
    # As in training, outputs are let go when they are sent: gradient edges are enough for the backward.
    differentiable = [tensor for tensor in sent if tensor.requires_grad]
    edges = [get_gradient_edge(tensor) for tensor in differentiable]
    shapes = [(tensor.shape, tensor.dtype) for tensor in differentiable]
    del sent, differentiable
    if record is not None:
        record.mark("backward")
    if edges:
        gradients = [torch.ones(shape, dtype=dtype) for shape, dtype in shapes]
        torch.autograd.backward(edges, gradients)


def _forward(
    replay: StageProgram, step: Callable[[], Any], loss_of: Callable[[Any], Tensor], received: _Messages
) -> _Messages:
    """What goes to the next stage; of the last one the loss."""
    shapes = Shapes.of(replay.graph)
    inputs = []  # leaves of the stage's own graph
    for value, tensor in zip(replay.plan.receives, received, strict=True):
        leaf = tensor.clone()
        inputs.append(leaf.requires_grad_(shapes.values[value].requires_grad))
    with replay.wrappers.active([replay.graph]):
        sent, result = run_stage(replay, step, tuple(inputs), shapes)
    if replay.is_last:
        return (loss_of(result),)
    return sent
