"""One stage of a pipeline: what it computes, and what torch's schedules call of it.

torch's own ``PipelineStage`` fixes the shapes of its messages at the first step and holds a receive buffer for each
micro-batch and direction from then on. :class:`Stage` offers the same methods to the schedules, and nothing else of it:
it is told the shapes of every micro-batch at each step, takes a buffer when a receive is posted and lets go of it when
it has been used. So shapes may differ between micro-batches and between steps. Sends and receives are made here, as
``P2POp``; torch's schedule starts them and waits for them, as it also calls the forwards and backwards. By gloo a
message travels only when its receiver asks for it: with one stage a rank, receives are started one micro-batch ahead.

A forward keeps, for the micro-batch's backward, two ends of its piece of the autograd graph::

    message --> leaf --> [ the stage's part of the step ] --> output --> message
                 |  gradient read here        edge: backward starts here  |
    message <----+                                                        +<---- message
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.records import TensorSpec
from lightning_smddp.pipeline.partition.microbatches import MicroBatches
from lightning_smddp.pipeline.runtime.messages import Boundary, Neighbour
from lightning_smddp.pipeline.runtime.remote_tensor import OTHER_PATH, ReplayError
from lightning_smddp.pipeline.runtime.spans import SpanRecorder
from lightning_smddp.pipeline.runtime.split_backward import SplitBackward, backward
from lightning_smddp.pipeline.runtime.stage_program import StageProgram, Step, TracedPath
from lightning_smddp.pipeline.runtime.step_exchange import Failure
from lightning_smddp.pipeline.runtime.step_run import run_stage
from lightning_smddp.planner.timeline import SpanKind
from lightning_smddp.pytree import detached

Compute: TypeAlias = Callable[[int, int, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""What (a stage, for a micro-batch, with what it has received) sends to the next stage.

The last stage returns ``(loss,)`` in training, a weighted 0-d tensor, or ``()`` where a micro-batch has none.
"""


@dataclass
class RunningStep:
    """The step that a pipeline runs now, on the stages of this rank: what they :data:`Compute`.

    Attributes:
        paths: of each micro-batch.
        step: the user's.
        microbatches: of the batch.
        outputs: where the step ends here, what it returned for each micro-batch; else empty.
        failures: on stages here. Behind the first one nothing is computed here any more.
    """

    paths: Sequence[TracedPath]
    step: Step
    microbatches: MicroBatches
    outputs: list[Any]
    failures: list[Failure] = field(default_factory=list)

    def __call__(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See :data:`Compute`.

        A step that fails does not stop the schedule, as other stages wait for messages: they get NaN from here on, and
        all ranks hear of the failure behind the schedule. See ``step_exchange.py``.
        """
        path = self.paths[index]
        program, boundary = path.staged.programs[stage], path.boundaries[stage + 1]
        if not self.failures:
            try:
                sent = self._run(program, index, received)
                if not program.is_last:
                    _require_announced(sent, boundary)
                return sent
            except Exception as error:
                diverged = isinstance(error, (ReplayError, SplitError))
                text = str(error) if diverged else f"{type(error).__name__}: {error}"
                self.failures.append(Failure(index, stage, text, error, diverged))
        return tuple(_without_values(spec, program.device) for spec in boundary.values.specs)

    def _run(self, program: StageProgram, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What goes to the next stage for micro-batch ``index``; on the last one also note what the step returned."""
        step, microbatch, shapes = self.step, self.microbatches[index], self.paths[index].shapes
        with step.around(program.plan.stage, index, microbatch, keep=program.is_last):
            run = functools.partial(step, microbatch)
            sent, result = run_stage(program, run, received, shapes, seed=step.seed_of(index))
        if not program.is_last:
            return sent
        loss = step.loss(microbatch, result)
        # The results of all micro-batches wait for the batch's end: they must not keep their graphs until then.
        self.outputs[index] = detached(result)
        return () if loss is None else (loss,)


@dataclass
class _Microbatch:
    """What a stage holds for one micro-batch of the running step; each entry only as long as it is needed.

    Gradients, and what they belong to, are those of the values in a boundary that need one, in their order.
    """

    # leaves, edges        from the forward to the backward: where gradients of inputs arrive, where it begins
    # outgoing             from the forward to the send
    # input_gradients      from the backward to the send, or the stage before here; None for what did not matter
    # split                from a backward's first part to its second
    leaves: Sequence[Tensor] = ()
    edges: Sequence[GradientEdge | None] = ()
    outgoing: Sequence[Tensor] = ()
    input_gradients: Sequence[Tensor | None] = ()
    split: SplitBackward | None = None


class Stage:
    """One stage on this rank, for any number of steps.

    Args:
        index: Which stage it is.
        rank_of_stage: The rank in ``group`` of every stage.
        group: The ranks of the pipeline.
        device: Where messages are received.
        ahead: See :class:`Neighbour`.

    Attributes:
        recorder: Records when the stage works.
    """

    def __init__(
        self,
        index: int,
        rank_of_stage: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        ahead: bool = False,
    ) -> None:
        self.stage_index = index
        self.num_stages = len(rank_of_stage)
        self.group_rank = group.rank()
        self.group_size = group.size()
        self.stage_index_to_group_rank = dict(enumerate(rank_of_stage))
        self.is_first = index == 0
        self.is_last = index == self.num_stages - 1
        self.device = device
        self.submod = nn.Module()  # torch's schedules look for FSDP's modules in it; nobody calls it
        self.has_backward = False
        self.recorder: SpanRecorder | None = None
        self._compute: Compute | None = None
        self._incoming: list[Boundary] = []
        self._outgoing: list[Boundary] = []
        self._microbatches: list[_Microbatch] = []
        ranks = self.stage_index_to_group_rank
        self._before = Neighbour(group, ranks.get(index - 1), device, ahead)
        self._behind = Neighbour(group, ranks.get(index + 1), device, ahead)

    def begin_step(self, compute: Compute, boundaries: Sequence[Sequence[Boundary]], has_backward: bool) -> None:
        """Prepare for a step; ``boundaries[microbatch][stage]`` is what goes into ``stage``."""
        index = self.stage_index
        self._compute = compute
        self._incoming = [row[index] for row in boundaries]
        self._outgoing = [row[index + 1] for row in boundaries]
        self.has_backward = has_backward
        self._microbatches = [_Microbatch() for _ in boundaries]
        self._before.begin_step([boundary.values for boundary in self._incoming])
        self._behind.begin_step([boundary.gradients for boundary in self._outgoing])

    def end_step(self) -> None:
        """Let go of everything that the step has left, also when it failed."""
        self._compute = None
        self._microbatches = []
        self._before.begin_step(())
        self._behind.begin_step(())

    # ---- what torch's schedules call, by torch's names -----------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a forward's inputs."""
        return self._before.receives(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: tuple[Tensor, ...], mb_index: int) -> None:
        """In place of a receive, when the stage before is on this rank."""
        self._before.put(mb_index, prev_stage_outputs)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Any,
        kwargs: Any = None,
        save_forward_output: bool = True,
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the body; return what goes to a next stage on this rank, or the loss (0 if there is none)."""
        state = self._microbatches[fwd_chunk_id]
        # Nobody here may hold on to activations: what was received lives as long as the graph of the body needs it, and
        # what is sent until its message is gone.
        # Views, as autocast remembers its copies of other leaves until the step ends.
        received = tuple([tensor.view_as(tensor) for tensor in self._before.take(fwd_chunk_id)])
        start = self._begins()
        state.leaves = [received[position].requires_grad_() for position in self._incoming[fwd_chunk_id].trained]
        assert self._compute is not None
        outputs = self._compute(self.stage_index, fwd_chunk_id, received)
        del received
        self._ends("forward", fwd_chunk_id, start)
        if self.is_last and not (self.has_backward and outputs):
            return torch.zeros((), device=self.device)
        # What leaves the stage has no graph. The backward begins at edges, which hold the graph without the outputs'
        # memory.
        sent = tuple([output.detach() for output in outputs])
        if self.is_last:
            state.edges = [get_gradient_edge(outputs[0])]
            self._behind.put(fwd_chunk_id, [torch.ones_like(sent[0])])
            return sent[0]
        trained = [outputs[position] for position in self._outgoing[fwd_chunk_id].trained]
        state.edges = [get_gradient_edge(output) if output.requires_grad else None for output in trained]
        next_rank = self.stage_index_to_group_rank[self.stage_index + 1]
        if next_rank != self.group_rank:  # else the schedule hands over what is returned
            state.outgoing = sent
        return sent

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a forward's outputs."""
        state = self._microbatches[fwd_chunk_id]
        sent, state.outgoing = state.outgoing, ()
        if not sent:  # the next stage is here, and has them
            return []
        return self._behind.sends(self._outgoing[fwd_chunk_id].values, sent)

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Nothing: the messages themselves hold what is sent. Called by torch from 2.15 on, when they have arrived."""

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of the outputs' gradients."""
        return [] if self.is_last else self._behind.receives(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Sequence[Tensor | None], mb_index: int) -> None:
        """In place of a receive, when the next stage is on this rank."""
        self._behind.put(mb_index, next_stage_bwd_outputs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """The backward, or its first part; the loss is the one that the forward has kept."""
        if not self.has_backward:
            return
        state = self._microbatches[bwd_chunk_id]
        pairs = zip(state.edges, self._behind.take(bwd_chunk_id), strict=True)
        roots = [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
        leaves = state.leaves
        state.leaves = state.edges = ()
        start = self._begins()
        if full_backward:
            state.input_gradients = backward(roots, leaves)
        else:
            state.split = SplitBackward(roots, leaves)
            state.input_gradients = state.split.inputs()
        self._ends("backward" if full_backward else "backward_input", bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second part of a split backward."""
        if not self.has_backward:
            return
        state = self._microbatches[bwd_chunk_id]
        split = state.split
        state.split = None
        assert split is not None, f"stage {self.stage_index}, micro-batch {bwd_chunk_id}: W before I"
        start = self._begins()
        split.weights()
        self._ends("backward_weight", bwd_chunk_id, start)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of the inputs' gradients; zeros for one that did not matter to the loss."""
        layout = self._incoming[bwd_chunk_id].gradients
        pairs = zip(layout.specs, self.get_local_bwd_output(bwd_chunk_id), strict=True)
        gradients = [spec.empty(self.device).zero_() if gradient is None else gradient for spec, gradient in pairs]
        return self._before.sends(layout, gradients)

    def get_local_bwd_output(self, mb_index: int) -> Sequence[Tensor | None]:
        """The inputs' gradients, when the stage before is on this rank."""
        state = self._microbatches[mb_index]
        gradients = state.input_gradients
        state.input_gradients = ()
        return gradients

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: hooks of the parameters average over replicas."""

    # ---- the rest is ours ----------------------------------------------------------------------------------------

    def _begins(self) -> Any:
        """When what is recorded by :meth:`_ends` began."""
        return self.recorder.now() if self.recorder is not None else None

    def _ends(self, kind: SpanKind, microbatch: int, start: Any) -> None:
        if self.recorder is not None:
            self.recorder.add(self.stage_index, kind, microbatch, start)


def _require_announced(outputs: Sequence[Tensor], boundary: Boundary) -> None:
    """Raise ``ReplayError`` for what the next stage does not expect: received as announced it would be wrong."""
    for output, spec in zip(outputs, boundary.values.specs, strict=True):
        # One that needs no gradient may stand for one that does.
        needs_gradient = output.requires_grad and not spec.requires_grad and torch.is_grad_enabled()
        if output.shape != spec.shape or output.dtype != spec.dtype or needs_gradient:
            made = TensorSpec.of(output)
            raise ReplayError(f"A stage has made {made} where the batch's sizes had led to {spec}. {OTHER_PATH}")


def _without_values(spec: TensorSpec, device: torch.device) -> Tensor:
    """NaN, so that nobody takes it for a result; zeros of types without, which are indices that exist."""
    has_nan = spec.dtype.is_floating_point or spec.dtype.is_complex
    return spec.empty(device).fill_(math.nan if has_nan else 0)
