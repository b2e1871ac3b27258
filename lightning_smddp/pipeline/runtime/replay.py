"""One stage's part of a step: the step's own code again, with other stages' values standing in.

The code between units runs on every stage. Operations on the batch alone are done for real. Of the items of the
:class:`~lightning_smddp.pipeline.capture.graph.StepGraph`, a stage does its own; those of earlier stages return what
was received, or a :class:`RemoteTensor`: a tensor with a shape and a type but no values. At the first item of a later
stage the step is left by an exception.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import WithoutFunctionMode
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.patches import patched_forwards
from lightning_smddp.pipeline.capture.python_random import PythonRandom
from lightning_smddp.pipeline.runtime.answers import Answers
from lightning_smddp.pipeline.runtime.eager import Compiled, Eager
from lightning_smddp.pipeline.runtime.remote import OTHER_COURSE, RemoteTensor, ReplayError, Shape, Shapes
from lightning_smddp.pipeline.runtime.stage_run import Observer, Run, StageDone, WriteWatch
from lightning_smddp.pipeline.runtime.tails import Tail
from lightning_smddp.pipeline.runtime.told import read_told, write_told

__all__ = [
    "RemoteTensor",
    "Observer",
    "Replay",
    "ReplayError",
    "Run",
    "Shape",
    "Shapes",
    "StageDone",
    "StagePlan",
    "active_run",
    "patched_units",
]


@dataclass(frozen=True)
class StagePlan:
    """What a stage does: items ``[begin, end)``, and those in ``again``; values that it receives and sends."""

    stage: int
    begin: int
    end: int
    again: frozenset[int]
    receives: tuple[int, ...]
    sends: tuple[int, ...]


_active = threading.local()  # .run: the replay that runs in this thread


def active_run() -> Run | None:
    """The stage's run that is under way in this thread."""
    run: Run | None = getattr(_active, "run", None)
    return run


class Replay:
    """Runs a step for one stage, again and again.

    Args:
        graph: the step.
        plan: the stage.
        root: the module that the step belongs to.
        device: where its tensors are.
        checkpointing: keep only the inputs of units for backward, and run units again in it.
    """

    def __init__(
        self, graph: StepGraph, plan: StagePlan, root: nn.Module, device: torch.device, checkpointing: bool = False
    ) -> None:
        self.graph, self.plan, self.root, self.device = graph, plan, root, device
        self.checkpointing = checkpointing
        self.told = graph.told(plan.begin)
        self.tells = [] if plan.end == len(graph.nodes) else graph.told(plan.end)
        self.python_random: PythonRandom | None = None
        if graph.draws:
            self.python_random = PythonRandom(root, device if graph.shares_draws else None)
        buffers = {name for item in graph.nodes for name in item.buffers}
        self.sources = {id(p) for p in root.parameters()} | {id(b) for n, b in root.named_buffers() if n in buffers}
        self.is_last, self.is_rehearsal = plan.end == len(graph.nodes), plan.stage < 0
        self.last_unit = max((item.index for item in graph.nodes if item.module is not None), default=-1)
        self.mine = frozenset(range(plan.begin, plan.end)) | plan.again
        rebinds = [rebind for item in graph.nodes for rebind in item.rebinds]
        own = [rebind for item in graph.nodes[plan.begin : plan.end] for rebind in item.rebinds]
        self.changed_memories = {graph.values[rebind.new].memory for rebind in own}
        self.changing = {rebind.old for rebind in rebinds if rebind.old is not None}
        self.changing_memories = {graph.values[rebind.new].memory for rebind in rebinds}
        self.keeps = frozenset(plan.sends) | {rebind.new for rebind in rebinds} | graph.left

    def run(
        self,
        step: Callable[[], Any],
        received: Sequence[Tensor],
        shapes: Shapes,
        observe: Observer | None = None,
        record: Shapes | None = None,
        reads: list[str] | None = None,
        answers: Answers | None = None,
        tail: Tail | None = None,
        writes: WriteWatch | None = None,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Run ``step`` for this stage, units patched by :func:`patched_units`.

        Args:
            step: the user's step on one micro-batch.
            received: what the stage before sent: tensors, and what Python read of them where it read any.
            shapes: what values of earlier stages look like; also checked against what is made here.
            observe: called around each item that is done here.
            record: takes down what is made here looks like, instead of the check. With it, ``shapes`` need only know
                the earlier stages, so that stage after stage can find the shapes of a new signature.
            reads: takes down what Python code reads of the batch.
            answers: what runs of the step on this micro-batch have read of it before.
            tail: takes down what runs behind the last unit.
            writes: called before what writes in place.

        Returns:
            What the next stage receives (empty on the last), and what the step returned (None unless last).

        Raises:
            ReplayError: the step took another course than when it was traced, or its values have other shapes.
        """
        told = read_told(self.told, received[-1]) if self.told and not self.is_rehearsal else {}
        received = received[: len(self.plan.receives)]
        given = dict(zip(self.plan.receives, map(self._prepare, self.plan.receives, received), strict=True))
        run = Run(self, given, shapes, observe, record, reads, told, answers, writes)
        run.tail = tail
        outer, _active.run = getattr(_active, "run", None), run
        result = None
        try:
            with Eager(), run:
                result = step()
            self._check_end(run)
            if tail is not None:
                tail.end()
            if self.is_last:
                ((result,), _) = run.present((result,), {})
        except StageDone:
            pass
        finally:
            _active.run = outer
        sent = tuple(run.environment[v] for v in self.plan.sends)
        if record is None:
            self._check_sent(sent, shapes)
        if self.tells and not self.is_rehearsal:
            sent = (*sent, write_told(self.tells, run.told, self.device))
        return sent, result if self.is_last else None

    def _prepare(self, value: int, tensor: Tensor) -> Tensor:
        """Received tensors are contiguous leaves: give them the strides of old, and a copy if they are changed here."""
        known = self.graph.values[value]
        shape = Shape(tuple(tensor.shape), known.stride, tensor.dtype, tensor.requires_grad)
        if known.shape == shape.shape and not shape.is_contiguous() and shape.is_dense():
            return torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=tensor.device).copy_(tensor)
        return tensor.clone() if known.memory in self.changed_memories else tensor

    def _check_end(self, run: Run) -> None:
        missing = self.graph.nodes[run.cursor : self.plan.end]
        if run.done:
            return  # the user's code caught StageDone
        if self.is_last and all(item.module is None for item in missing):
            return
        rest = self.graph.nodes[run.cursor :]
        if all(item.module is None for item in rest) and all(value in run.environment for value in self.plan.sends):
            return  # what follows is what logging does with a value, which only the last stage comes to
        if not self.is_last and not missing:
            expected = f"{self.graph.nodes[self.plan.end].name}, the next stage's first item"
        else:
            expected = missing[0].name
        raise ReplayError(f"The step returned before it came to {expected}. {OTHER_COURSE}")

    def _check_sent(self, sent: tuple[Tensor, ...], shapes: Shapes) -> None:
        for value, tensor in zip(self.plan.sends, sent, strict=True):
            known = shapes.values[value]
            if torch.is_grad_enabled() and known.requires_grad != tensor.requires_grad:
                verb = "requires" if tensor.requires_grad else "needs no"
                raise ReplayError(
                    f"What {self.graph.nodes[self.graph.producers[value]].name} made {verb} a gradient; when the "
                    "step was traced it was the other way round. Parameters were frozen or unfrozen since."
                )


@contextmanager
def patched_units(root: nn.Module, units: Sequence[str]) -> Iterator[None]:
    """Let calls of ``units`` go through the replay that runs; outside of one they are what they were."""

    def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def unit(*args: Any, **kwargs: Any) -> Any:
            run: Run | None = getattr(_active, "run", None)
            if run is None or run.inside:
                return forward(*args, **kwargs)
            with WithoutFunctionMode(run) as unseen, Compiled(unseen):
                return run.unit(name, forward, args, kwargs)

        return unit

    with patched_forwards(root, wrap, dict.fromkeys(units), compiled=True):
        yield
