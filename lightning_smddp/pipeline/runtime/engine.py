"""Runs one step of a pipeline: torch's schedules over stages whose messages may have any shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat.torch import pipeline_schedule_class, run_pipeline_schedule
from lightning_smddp.communication.device_watch import mark
from lightning_smddp.communication.groups import connect_pairs
from lightning_smddp.pipeline.runtime.remote import Boundary
from lightning_smddp.pipeline.runtime.schedules import Schedule, for_microbatches
from lightning_smddp.pipeline.runtime.spans import Recorder
from lightning_smddp.pipeline.runtime.stage import Stage, StageBody
from lightning_smddp.wording import counted

_KEPT_SCHEDULES = 16  # torch's objects, one per number of micro-batches and mode; they hold orders only, no tensors


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
        recorder: Recorder | None = None,
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
        self._group, self._device, self._schedule, self._num_stages = group, device, schedule, num_stages
        self._recorder = recorder
        self._stages = [Stage(index, placement, group, device, bodies[index], recorder) for index in here]
        self._placement = placement
        self._schedules: dict[tuple[int, bool], Any] = {}
        self._connected = False
        if device.type != "cpu":
            self._connect()

    @property
    def stages(self) -> list[int]:
        """The stages on this rank."""
        return [stage.stage_index for stage in self._stages]

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Around what is no step of the user's."""
        recorder = self._recorder
        self.record(None)
        try:
            yield
        finally:
            self.record(recorder)

    def record(self, recorder: Recorder | None) -> None:
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

        Raises:
            ValueError: when ``boundaries`` is incomplete, or a stage's outputs are not as it says.
        """
        return self._step(num_microbatches, boundaries, has_backward=True)

    def evaluate(self, num_microbatches: int, boundaries: Sequence[Sequence[Boundary]]) -> None:
        """Forward only, without gradients. What the last stage's body returns is ignored. See :meth:`train`."""
        self._step(num_microbatches, boundaries, has_backward=False)

    def _step(self, count: int, boundaries: Sequence[Sequence[Boundary]], has_backward: bool) -> list[Tensor]:
        if len(boundaries) != count or any(len(row) != self._num_stages - 1 for row in boundaries):
            raise ValueError(
                f"boundaries={[len(row) for row in boundaries]} for num_microbatches={count} and {self._num_stages} "
                f"stages: give {count} rows of {self._num_stages - 1}"
            )
        self._connect()
        mark(communicates=True)  # the device receives first; in the first stage a mark of its own follows at once
        schedule = self._schedule_of(count, has_backward)
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
            self._schedules.clear()  # they may remember messages of this step
            raise
        finally:
            for stage in self._stages:
                stage.end_step()
        return losses

    def _schedule_of(self, num_microbatches: int, has_backward: bool) -> Any:
        key = (num_microbatches, has_backward)
        if key not in self._schedules:
            while len(self._schedules) >= _KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            schedule = for_microbatches(self._schedule, self._group.size(), self._num_stages, num_microbatches)
            stages = self._stages if schedule.several_stages else self._stages[0]
            # torch's class, but it leaves the set-up of stages, with shapes that are fixed for good, to us
            self._schedules[key] = pipeline_schedule_class(schedule.torch_class)(
                stages, num_microbatches, loss_fn=_the_loss_itself if has_backward else None, scale_grads=False
            )
        self._schedules[key] = schedule = self._schedules.pop(key)  # the most recently used one is last
        return schedule

    def _connect(self) -> None:
        """Open the connections that the schedules use, which backends do lazily."""
        if self._connected or self._group.size() == 1:
            return
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        connect_pairs(self._group, zip(self._placement, self._placement[1:], strict=False), self._device)
        self._connected = True


def _the_loss_itself(output: Tensor, target: None) -> Tensor:
    """The last stage has computed its loss already."""
    return output
