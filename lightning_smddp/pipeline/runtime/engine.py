"""Runs steps on this rank's stages: on which paths, under torch's schedules, over messages of any shapes.

:class:`PipelineRuntime` knows the steps, and :class:`PipelineEngine` below it the schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import pipeline_schedule_class, run_pipeline_schedule
from lightning_smddp.communication.groups import connect_pairs
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.mesh import Channel, Groups
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.remote import Boundary
from lightning_smddp.pipeline.runtime.schedules import Schedule, for_microbatches
from lightning_smddp.pipeline.runtime.spans import SpanRecorder
from lightning_smddp.pipeline.runtime.stage import ReplayedStage, Stage, StageBody
from lightning_smddp.pipeline.runtime.stage_program import (
    Observer,
    RunningStep,
    StagedStep,
    StagePlan,
    StageProgram,
    Step,
    TracedPath,
    dry_run_plan,
)
from lightning_smddp.pipeline.runtime.step_exchange import Failure, StepExchange
from lightning_smddp.pipeline.runtime.wrappers import Wrappers
from lightning_smddp.wording import counted

_KEPT_SCHEDULES = 16  # torch's objects, one per number of micro-batches and mode; they hold orders only, no tensors


class StepOutcome(NamedTuple):
    """What a step on a batch has come to, on this rank.

    Attributes:
        outputs: what it returned for each micro-batch, on the rank where it ends; else empty.
        failures: on the stages of this rank.
    """

    outputs: list[Any]
    failures: list[Failure]


class PipelineRuntime:
    """Runs steps on this rank's stages.

    Args:
        root: the module whose step is run.
        groups: of this rank.
        device: where its tensors are.
        schedule: the schedule of training steps; evaluation uses its placement.
        num_stages: stages on all ranks of the pipeline.
        checkpointing: whether units keep only their inputs for backward.
        recorder: see :class:`PipelineEngine`.
    """

    def __init__(
        self,
        root: nn.Module,
        groups: Groups,
        device: torch.device,
        schedule: Schedule,
        num_stages: int,
        checkpointing: bool = False,
        recorder: SpanRecorder | None = None,
    ) -> None:
        self.root = root
        self.groups = groups
        self.device = device
        self.num_stages = num_stages
        self.rank_of_stage = schedule.rank_of_stage(num_stages, groups.pipeline.size())
        self.last_rank = self.rank_of_stage[-1]
        self.checkpointing = checkpointing
        self.wrappers = Wrappers(root, device)
        self._stages: dict[int, ReplayedStage] = {}
        for stage, rank in enumerate(self.rank_of_stage):
            if rank == groups.pipeline_rank:
                self._stages[stage] = ReplayedStage(stage, device)
        self.engine = PipelineEngine(
            groups.neighbours,
            device,
            schedule,
            num_stages,
            self._stages,
            recorder,
        )
        self.exchange = StepExchange(Channel(groups.pipeline, device), groups.host, self.last_rank)

    @property
    def ends_here(self) -> bool:
        """Whether the last stage, where the step ends, is on this rank."""
        return self.last_rank == self.groups.pipeline_rank

    def stage(self, graph: StepGraph, stages: tuple[StagePlan, ...]) -> StagedStep:
        """This rank's part of a step."""
        programs = {
            stage: StageProgram(graph, stages[stage], self.wrappers, self.checkpointing) for stage in self._stages
        }
        dry_run = StageProgram(graph, dry_run_plan(graph), self.wrappers)
        return StagedStep(graph, stages, programs, dry_run)

    def run(
        self,
        paths: Sequence[TracedPath],
        step: Step,
        microbatches: Sequence[MicroBatch],
        train: bool,
        observe: Observer | None = None,
    ) -> StepOutcome:
        """Run one step: forward, and in training backward, of all micro-batches. Collective over the pipeline.

        Args:
            paths: for each micro-batch the path that the step takes on it, of a ``TraceCache`` (``trace_cache.py``).
            step: the user's.
            microbatches: of one batch.
            train: whether there is a backward.
            observe: called around each node that is done here.

        Returns:
            What the step returned, and what has failed on this rank. Where something has on any rank, gradients and
            buffers that the step changes are of no use: all ranks have to hear of it, by a ``StepExchange``.
        """
        count = len(microbatches)
        boundaries = []  # by micro-batch, then by stage
        for staged, shapes in paths:
            boundaries.append([staged.boundary(stage, shapes, train) for stage in range(self.num_stages - 1)])
        graphs = {id(staged): staged.graph for staged, _ in paths}  # of all paths, each once
        running = RunningStep(paths, step, microbatches, train, observe, [None] * count)
        run_step = self.engine.train if train else self.engine.evaluate
        try:
            for body in self._stages.values():
                body.running = running
            with self.wrappers.active(list(graphs.values())), self.wrappers.generators.preserved():
                run_step(count, boundaries)
        finally:
            for body in self._stages.values():
                body.running = None
        return StepOutcome(running.results if self.ends_here else [], running.failures)

    def require_success(self, run: StepOutcome) -> list[Any]:
        """The outputs of ``run``. Collective over the pipeline.

        Raises:
            Exception: on every rank: see :meth:`StepExchange.run`.
        """
        self.exchange.run(None, failures=run.failures)
        return run.outputs


class PipelineEngine:
    """This rank's part of a pipeline, for any number of training and evaluation steps.

    Every rank of ``group`` has to make the same calls in the same order, with the same number of micro-batches and the
    same boundaries. Each stage's body is called exactly once per micro-batch and step. Gradients are accumulated into
    the parameters' ``.grad``; they are those of the sum of the losses. Random state and buffers are left to the bodies.

    An exception that a body raises comes out of the step as it is. The other ranks of the pipeline then wait for
    messages that will not come: end this process or its group, and start the group anew.

    Args:
        group: The ranks of the pipeline, in the order of their stages. On devices creation is collective over it.
        device: The device of this rank's stages and of the messages.
        schedule: How stages are placed and in which order they work.
        num_stages: Stages on all ranks together.
        bodies: Stage -> what it computes, for the stages on this rank.
        recorder: Records when this rank works and waits.

    Raises:
        ValueError: when the stages cannot be placed so.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        schedule: Schedule,
        num_stages: int,
        bodies: Mapping[int, StageBody],
        recorder: SpanRecorder | None = None,
    ) -> None:
        stages_per_rank, rest = divmod(num_stages, group.size())
        if rest or not schedule.stages_per_rank_ok(stages_per_rank):
            raise ValueError(
                f"schedule={schedule.name!r} cannot place {num_stages} stages on {counted(group.size(), 'rank')}; "
                f"use {counted(schedule.default_stages_per_rank * group.size(), 'stage')}"
            )
        placement = schedule.rank_of_stage(num_stages, group.size())
        here = [stage for stage, rank in enumerate(placement) if rank == group.rank()]
        if sorted(bodies) != here:
            raise ValueError(f"rank {group.rank()} holds stages {here}, but bodies are for {sorted(bodies)}")
        self._group = group
        self._device = device
        self._schedule = schedule
        self._num_stages = num_stages
        self._recorder = recorder
        self._stages = [Stage(index, placement, group, device, bodies[index], recorder) for index in here]
        self._placement = placement
        # torch works out a schedule's orders in its constructor: so schedules are kept.
        self._schedule_of = functools.lru_cache(_KEPT_SCHEDULES)(self._new_schedule)
        self._connected = False
        if device.type != "cpu":
            self._connect()

    @property
    def stages(self) -> list[int]:
        """Numbers of the stages on this rank, ascending."""
        return [stage.stage_index for stage in self._stages]

    def record(self, recorder: SpanRecorder | None) -> None:
        """Record the steps from now on, or no more."""
        self._recorder = recorder
        for stage in self._stages:
            stage.recorder = recorder

    def train(self, num_microbatches: int, boundaries: Sequence[Sequence[Boundary]]) -> list[Tensor]:
        """One training step: forward and backward of every micro-batch.

        Args:
            num_microbatches: How many; a number that the schedule itself refuses runs under its substitute.
            boundaries: ``boundaries[microbatch][stage]`` is what ``stage`` sends to the next one.

        Returns:
            The detached losses in the order of the micro-batches (0 for none), on the rank of the last stage; elsewhere
            an empty list.
        """
        return self._step(num_microbatches, boundaries, has_backward=True)

    def evaluate(self, num_microbatches: int, boundaries: Sequence[Sequence[Boundary]]) -> None:
        """Forward only, without gradients. What the last stage's body returns is ignored. See :meth:`train`."""
        self._step(num_microbatches, boundaries, has_backward=False)

    def _step(self, count: int, boundaries: Sequence[Sequence[Boundary]], has_backward: bool) -> list[Tensor]:
        self._connect()
        schedule = self._schedule_of(count, has_backward)
        # boundaries[m] = [what stage 0 sends to 1, what stage 1 sends to 2, ...] for micro-batch m
        for stage in self._stages:
            index = stage.stage_index
            incoming = [() if stage.is_first else row[index - 1] for row in boundaries]
            outgoing = [() if stage.is_last else row[index] for row in boundaries]
            stage.begin_step(incoming, outgoing, has_backward)
        losses: list[Tensor] = []
        try:
            with torch.set_grad_enabled(has_backward):
                if self._recorder is not None:
                    self._recorder.begin_step()
                run_pipeline_schedule(schedule, count, losses if has_backward else None)
                if self._recorder is not None:
                    self._recorder.end_step()
        except BaseException:
            self._schedule_of.cache_clear()  # they may remember messages of this step
            raise
        finally:
            for stage in self._stages:
                stage.end_step()
        return losses

    def _new_schedule(self, num_microbatches: int, has_backward: bool) -> Any:
        """An object of torch's class, which leaves the set-up of stages, with shapes that are fixed for good, to us."""
        schedule = for_microbatches(self._schedule, self._group.size(), self._num_stages, num_microbatches)
        return pipeline_schedule_class(schedule.torch_class)(
            self._stages if schedule.several_stages else self._stages[0],
            num_microbatches,
            loss_fn=_the_loss_itself if has_backward else None,
            scale_grads=False,  # it would divide `.grad` in place, evaluation included
        )

    def _connect(self) -> None:
        """Open the connections that the schedules use, which backends do lazily."""
        if self._connected or self._group.size() == 1:
            return
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        neighbours = zip(self._placement, self._placement[1:], strict=False)
        connect_pairs(self._group, neighbours, self._device)
        self._connected = True


def _the_loss_itself(output: Tensor, target: None) -> Tensor:
    """The last stage has computed its loss already."""
    return output
