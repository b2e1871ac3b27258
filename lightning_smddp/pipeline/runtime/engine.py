"""Runs steps on this rank's stages: on which paths, under torch's schedules, over messages of any shapes.

:class:`PipelineRuntime` knows the steps, and :class:`PipelineEngine` below it the schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import pipeline_schedule_class, run_pipeline_schedule
from lightning_smddp.communication.groups import connect_pairs
from lightning_smddp.pipeline.activations import Checkpointing
from lightning_smddp.pipeline.capture.boundaries import StagePlan
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.mesh import Channel, Groups
from lightning_smddp.pipeline.partition.microbatches import MicroBatches
from lightning_smddp.pipeline.runtime.messages import Boundary
from lightning_smddp.pipeline.runtime.schedules import Schedule, for_microbatches
from lightning_smddp.pipeline.runtime.spans import SpanRecorder
from lightning_smddp.pipeline.runtime.stage import Compute, RunningStep, Stage
from lightning_smddp.pipeline.runtime.stage_program import (
    StagedStep,
    StageProgram,
    Step,
    TracedPath,
    dry_run_plan,
)
from lightning_smddp.pipeline.runtime.step_exchange import StepExchange
from lightning_smddp.pipeline.runtime.wrappers import Wrappers

_KEPT_SCHEDULES = 16  # torch's objects, one per number of micro-batches and mode; they hold orders only, no tensors


class PipelineRuntime:
    """Runs steps on this rank's stages.

    Args:
        root: the module whose step is run.
        groups: of this rank.
        device: where its tensors are.
        schedule: the schedule of training steps; evaluation uses its placement.
        num_stages: stages on all ranks of the pipeline.
        checkpointing: what units keep for backward.
    """

    def __init__(
        self,
        root: nn.Module,
        groups: Groups,
        device: torch.device,
        schedule: Schedule,
        num_stages: int,
        checkpointing: Checkpointing,
    ) -> None:
        self.root = root
        self.groups = groups
        self.device = device
        self.rank_of_stage = schedule.rank_of_stage(num_stages, groups.pipeline.size())
        self.checkpointing = checkpointing
        self.wrappers = Wrappers(root, device)
        self.engine = PipelineEngine(groups.neighbours, device, schedule, num_stages)
        self.exchange = StepExchange(Channel(groups.pipeline, device), groups.host, self.rank_of_stage[-1])

    @property
    def ends_here(self) -> bool:
        """Whether the last stage, where the step ends, is on this rank."""
        return self.rank_of_stage[-1] == self.groups.pipeline_rank

    def stage(self, graph: StepGraph, stages: tuple[StagePlan, ...]) -> StagedStep:
        """This rank's part of a step."""
        here = [stage.stage_index for stage in self.engine.stages]
        programs = {stage: StageProgram(graph, stages[stage], self.wrappers, self.checkpointing) for stage in here}
        dry_run = StageProgram(graph, dry_run_plan(graph), self.wrappers)
        return StagedStep(graph, stages, programs, dry_run)

    def run(self, paths: Sequence[TracedPath], step: Step, microbatches: MicroBatches, train: bool) -> RunningStep:
        """Run one step: forward, and in training backward, of all micro-batches. Collective over the pipeline.

        Args:
            paths: for each micro-batch the path that the step takes on it, of a ``TraceCache`` (``trace_cache.py``).
            step: the user's.
            microbatches: of one batch.
            train: whether there is a backward.

        Returns:
            What the step returned, and what has failed on this rank. Where something has on any rank, gradients and
            buffers that the step changes are of no use: all ranks have to hear of it, by a ``StepExchange``.
        """
        graphs = {path.number: path.staged.graph for path in paths}
        running = RunningStep(paths, step, microbatches, [None] * len(microbatches))
        with self.wrappers.active(list(graphs.values())), self.wrappers.generators.preserved():
            self.engine.run(running, [path.boundaries for path in paths], train)
        if not self.ends_here:
            running.outputs = []  # of a step that calls no module of a later stage
        return running


class PipelineEngine:
    """This rank's part of a pipeline, for any number of training and evaluation steps.

    Every rank of ``group`` has to make the same calls in the same order, with the same boundaries. Gradients are
    accumulated into the parameters' ``.grad``; they are those of the sum of the losses.

    An exception comes out of the step as it is. The other ranks of the pipeline then wait for messages that will not
    come: end this process or its group, and start the group anew.

    Args:
        group: The ranks of the pipeline, in the order of their stages. On devices creation is collective over it.
        device: The device of this rank's stages and of the messages.
        schedule: How stages are placed and in which order they work.
        num_stages: Stages on all ranks together.

    Attributes:
        stages: on this rank, in their order.
        recorder: records when this rank works and waits, while there is one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, schedule: Schedule, num_stages: int) -> None:
        placement = schedule.rank_of_stage(num_stages, group.size())
        here = [stage for stage, rank in enumerate(placement) if rank == group.rank()]
        ahead = device.type == "cpu" and not schedule.several_stages
        self.stages = [Stage(index, placement, group, device, ahead) for index in here]
        self.recorder: SpanRecorder | None = None
        self._group = group
        self._schedule = schedule
        self._num_stages = num_stages
        # torch works out a schedule's orders in its constructor: so schedules are kept.
        self._schedule_of = functools.lru_cache(_KEPT_SCHEDULES)(self._new_schedule)
        if device.type != "cpu" and group.size() > 1:
            # Open the connections that the schedules use, which backends do lazily.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            connect_pairs(group, zip(placement, placement[1:], strict=False), device)

    def run(self, compute: Compute, boundaries: Sequence[Sequence[Boundary]], train: bool) -> None:
        """One step: forward, and to ``train`` backward, of every micro-batch. Collective.

        Args:
            compute: called once for each micro-batch and each stage of this rank.
            boundaries: ``boundaries[microbatch][stage]`` is what goes into ``stage``; then nothing, behind the last
                one. A number of micro-batches that the schedule itself refuses runs under its substitute.
            train: else what the last stage returns is ignored, and nothing has gradients.
        """
        schedule = self._schedule_of(len(boundaries), train)
        recorder = self.recorder
        for stage in self.stages:
            stage.recorder = recorder
            stage.begin_step(compute, boundaries, train)
        try:
            with torch.set_grad_enabled(train):
                if recorder is not None:
                    recorder.begin_step()
                run_pipeline_schedule(schedule, len(boundaries), train)
                if recorder is not None:
                    recorder.end_step()
        except BaseException:
            self._schedule_of.cache_clear()  # they may remember messages of this step
            raise
        finally:
            for stage in self.stages:
                stage.end_step()

    def _new_schedule(self, num_microbatches: int, has_backward: bool) -> Any:
        """An object of torch's class, which leaves the set-up of stages, with shapes that are fixed for good, to us."""
        schedule = for_microbatches(self._schedule, self._group.size(), self._num_stages, num_microbatches)
        return pipeline_schedule_class(schedule.torch_class)(
            self.stages if schedule.several_stages else self.stages[0],
            num_microbatches,
            loss_fn=_the_loss_itself if has_backward else None,
            scale_grads=False,  # it would divide `.grad` in place, evaluation included
        )


def _the_loss_itself(output: Tensor, target: None) -> Tensor:
    """The last stage has computed its loss already."""
    return output
