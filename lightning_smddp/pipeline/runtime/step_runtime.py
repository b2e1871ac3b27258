"""The steps of one rank of a pipeline: which paths they take, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_smddp.pipeline.capture.foreign_writes import NewWrites
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.partition.cuts import StageCuts
from lightning_smddp.pipeline.partition.kept_numbers import KeptNumbers
from lightning_smddp.pipeline.partition.mesh import Groups
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.departures import require_no_departure
from lightning_smddp.pipeline.runtime.engine import PipelineEngine
from lightning_smddp.pipeline.runtime.replay import Observer, Replay, patched_units
from lightning_smddp.pipeline.runtime.schedules import Schedule
from lightning_smddp.pipeline.runtime.spans import Recorder
from lightning_smddp.pipeline.runtime.stage import ReplayedStage
from lightning_smddp.pipeline.runtime.stage_graph import probe_plan
from lightning_smddp.pipeline.runtime.staged_step import RunningStep, StagedStep, Step, TracedPath
from lightning_smddp.pipeline.runtime.tails import NEW_NUMBERS, NEW_OWNERS, NOTHING_NEW, KnownTails, Tail


class PipelineRuntime:
    """Runs steps on this rank's stages.

    Args:
        root: the module whose step is run.
        groups: of this rank.
        device: where its tensors are.
        schedule: the schedule of training steps; evaluation uses its placement.
        num_stages: stages on all ranks of the pipeline.
        stage_parameters: parameters of each stage on this rank.
        checkpointing: whether units keep only their inputs for backward.
        recorder: see :class:`PipelineEngine`.

    Attributes:
        finds_owners: whether an object is found changed by the step of which no trace saw it.
        news: the most that was new in the steps since :meth:`accept_tails`, on all ranks alike; see ``tails.py``.
        writes: what steps write in place from lines that no trace has seen.
    """

    def __init__(
        self,
        root: nn.Module,
        groups: Groups,
        device: torch.device,
        schedule: Schedule,
        num_stages: int,
        stage_parameters: dict[int, list[nn.Parameter]],
        checkpointing: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.root, self.groups, self.device, self.num_stages = root, groups, device, num_stages
        self.rank_of_stage = schedule.rank_of_stage(num_stages, groups.pipeline.size())
        self.last_rank = self.rank_of_stage[-1]
        self.checkpointing = checkpointing
        self.writes = NewWrites()
        self._stages: dict[int, ReplayedStage] = {}
        for stage, rank in enumerate(self.rank_of_stage):
            if rank == groups.pipeline_rank:
                self._stages[stage] = ReplayedStage(stage, stage_parameters[stage], device)
        self.engine = PipelineEngine(groups.neighbours, device, schedule, num_stages, self._stages, recorder=recorder)
        self.finds_owners: Callable[[], bool] = lambda: False
        self._tails: list[tuple[StagedStep, Tail]] = []  # since they were accepted
        self.news = NOTHING_NEW

    @property
    def ends_here(self) -> bool:
        """Whether this rank's replay sees the end of the step."""
        return self.last_rank == self.groups.pipeline_rank

    def stage(self, graph: StepGraph, stage_cuts: StageCuts) -> StagedStep:
        """This rank's part of a step."""
        self.writes.known |= graph.writing_lines
        plans = stage_cuts.plans(len(graph.nodes))
        replays = {}
        for stage in self._stages:
            replays[stage] = Replay(graph, plans[stage], self.root, self.device, self.checkpointing)
        probe = Replay(graph, probe_plan(graph), self.root, self.device)
        return StagedStep(graph, stage_cuts, replays, probe)

    def run(
        self,
        paths: Sequence[TracedPath],
        step: Step,
        microbatches: Sequence[MicroBatch],
        train: bool,
        observe: Observer | None = None,
        looks: KeptNumbers | None = None,
    ) -> list[Any]:
        """Run one step: forward, and in training backward, of all micro-batches. Collective over the pipeline.

        Args:
            paths: for each micro-batch the path that the step takes on it; see :class:`TraceCache`.
            step: the user's.
            microbatches: of one batch.
            train: whether there is a backward.
            observe: called around each node that is done here.
            looks: numbers that modules keep, to look at; if given, :attr:`news` says whether something is new there, or
                behind the last unit; in any case, whether an object has changed for the first time.

        Returns:
            What the step returned for each micro-batch, on the rank where it ends; else an empty list.

        Raises:
            LeftCourseError: on every rank: on some stage the step did not do what it was traced to do. Gradients, and
                buffers that the step changes, are of no use then.
        """
        count = len(microbatches)
        edges = range(self.num_stages - 1)
        boundaries = [[path.staged.boundary(edge, path.shapes, train) for edge in edges] for path in paths]
        running = RunningStep(paths, step, microbatches, train, self.writes, observe, [None] * count)
        if looks is not None and self.ends_here:
            running.tails = []
        has_new_numbers = looks is not None and looks.is_new()
        units = dict.fromkeys(unit for path in paths for unit in path.staged.graph.units)
        try:
            for stage in self._stages.values():
                stage.running = running
            with patched_units(self.root, tuple(units)):
                if train:
                    self.engine.train(count, boundaries)
                else:
                    self.engine.evaluate(count, boundaries)
            self._require_expected(running, has_new_numbers)
        finally:
            for stage in self._stages.values():
                stage.running = None
        if not self.ends_here:
            return []
        return running.results

    def _require_expected(self, running: RunningStep, has_new_numbers: bool) -> None:
        """Vote on what was new in a step. Collective. Raises ``LeftCourseError`` on every rank if it cannot count."""
        for index, text in self.writes.found().items():
            running.failures.setdefault(index, text)
        news = NOTHING_NEW
        if self.finds_owners():
            news = max(news, NEW_OWNERS)
        if has_new_numbers:
            news = max(news, NEW_NUMBERS)
        found = running.tails or []
        for staged, tail in found:
            if staged.tails is not None:
                news = max(news, staged.tails.look(tail))
        self.news = max(self.news, require_no_departure(running.failures, *self.groups.host, news))
        self._tails += found

    def accept_tails(self) -> None:
        """What ran behind the last unit since this was called is known from here on."""
        for staged in {id(staged): staged for staged, _ in self._tails}.values():
            if staged.tails is None:
                staged.tails = KnownTails()
            staged.tails.accept([tail for its, tail in self._tails if its is staged])
        self._tails, self.news = [], NOTHING_NEW
