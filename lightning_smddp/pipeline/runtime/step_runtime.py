"""The steps of one rank of a pipeline: which graph, which stages, which shapes, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.foreign_writes import NewWrites
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.cuts import StageCuts
from lightning_smddp.pipeline.partition.kept_numbers import KeptNumbers
from lightning_smddp.pipeline.partition.mesh import Groups
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.departures import has_no_meaning, require_no_departure, without_meaning
from lightning_smddp.pipeline.runtime.engine import PipelineEngine
from lightning_smddp.pipeline.runtime.replay import Observer, Replay, ReplayError, Shapes, patched_units
from lightning_smddp.pipeline.runtime.schedules import Schedule
from lightning_smddp.pipeline.runtime.spans import Recorder
from lightning_smddp.pipeline.runtime.stage_run import WriteWatch
from lightning_smddp.pipeline.runtime.tails import NEW_NUMBERS, NEW_OWNERS, NOTHING_NEW, KnownTails, Tail
from lightning_smddp.pipeline.runtime.trace_cache import StagedStep, TracedPath, rehearsal_plan
from lightning_smddp.wire.broadcast import broadcast_structure
from lightning_smddp.wire.pytree import map_leaves


class Step(Protocol):
    """The user's step on one micro-batch."""

    def __call__(self, microbatch: MicroBatch) -> Any:
        """Run the step's code; returns what it returns."""
        ...

    def around(self, index: int, microbatch: MicroBatch, keep: bool) -> AbstractContextManager[object]:
        """Around each stage's replay of micro-batch ``index``; ``keep`` on the stage that sees the step's end."""
        ...

    def forget(self) -> None:
        """Throw away what was kept of replays so far."""
        ...

    def follows(self, tensor: Tensor) -> bool:
        """Whether what its code does to ``tensor`` in place is undone for each run, and done once for the batch."""
        ...

    def loss(self, microbatch: MicroBatch, result: Any) -> Tensor | None:
        """The loss to differentiate, weighted: the batch's loss is their sum. Called where the step ends."""
        ...


class _Body:
    """A stage as the engine sees it; which step it belongs to changes from call to call."""

    def __init__(self, stage: int, parameters: Sequence[nn.Parameter], runtime: PipelineRuntime) -> None:
        self.stage, self.runtime = stage, runtime
        self.module = nn.ParameterList(parameters)

    def __call__(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.runtime.run_stage(self.stage, microbatch, received)


@dataclass
class _Running:
    """The step that the engine runs now."""

    courses: Sequence[TracedPath]
    step: Step
    microbatches: Sequence[MicroBatch]
    train: bool
    results: list[Any]
    observe: Observer | None
    failures: dict[int, str] = field(default_factory=dict)  # by micro-batch, where a stage here left its course
    tails: list[tuple[StagedStep, Tail]] | None = None  # where the step ends here, of each micro-batch


class PipelineRuntime:
    """Runs steps on this rank's stages.

    Args:
        root: the module whose step is run.
        groups: this rank's place.
        device: where its tensors are.
        schedule: the schedule of training steps; evaluation uses its placement.
        num_stages: stages on all ranks of the pipeline.
        stage_parameters: parameters of each stage on this rank.
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
        stage_parameters: dict[int, list[nn.Parameter]],
        checkpointing: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.root, self.groups, self.device, self.num_stages = root, groups, device, num_stages
        self.rank_of_stage = schedule.rank_of_stage(num_stages, groups.pipeline.size())
        self.here = [stage for stage, rank in enumerate(self.rank_of_stage) if rank == groups.pipeline_rank]
        self.last_rank = self.rank_of_stage[-1]
        self.checkpointing = checkpointing
        bodies = {stage: _Body(stage, stage_parameters[stage], self) for stage in self.here}
        self.engine = PipelineEngine(groups.neighbours, device, schedule, num_stages, bodies, recorder=recorder)
        self._running: _Running | None = None
        self.writes = NewWrites()
        self.finds_owners: Callable[[], bool] = lambda: False  # that the step changes, and no trace saw it
        self._tails: list[tuple[StagedStep, Tail]] = []  # since they were accepted
        self.news = NOTHING_NEW  # of those, on all ranks alike

    @property
    def ends_here(self) -> bool:
        """Whether this rank's replay sees the end of the step."""
        return self.last_rank == self.groups.pipeline_rank

    def stage(self, graph: StepGraph, stage_cuts: StageCuts) -> StagedStep:
        """This rank's part of a step."""
        self.writes.known |= graph.writing_lines
        plans = stage_cuts.plans(len(graph.nodes))
        replays = {s: Replay(graph, plans[s], self.root, self.device, self.checkpointing) for s in self.here}
        rehearsal = Replay(graph, rehearsal_plan(graph), self.root, self.device)
        return StagedStep(graph, stage_cuts, replays, rehearsal)

    def run(
        self,
        courses: Sequence[TracedPath],
        step: Step,
        microbatches: Sequence[MicroBatch],
        train: bool,
        observe: Observer | None = None,
        looks: KeptNumbers | None = None,
    ) -> list[Any]:
        """Run one step: forward, and in training backward, of all micro-batches. Collective over the pipeline.

        Args:
            courses: for each micro-batch the course that the step takes on it; see :class:`TraceCache`.
            step: the user's.
            microbatches: of one batch.
            train: whether there is a backward.
            observe: called around each item that is done here.
            looks: numbers that modules keep; if given, :attr:`news` says whether something is new there, or behind the
                last unit; in any case, whether an object has changed for the first time.

        Returns:
            What the step returned for each micro-batch, on the rank where it ends; else an empty list.

        Raises:
            LeftCourseError: on every rank: on some stage the step did not do what it was traced to do. Gradients, and
                buffers that the step changes, are of no use then.
        """
        edges = range(self.num_stages - 1)
        boundaries = [[staged.boundary(edge, shapes, train) for edge in edges] for staged, shapes in courses]
        count = len(microbatches)
        self._running = running = _Running(courses, step, microbatches, train, [None] * count, observe)
        running.tails = [] if looks is not None and self.ends_here else None
        kept = NEW_NUMBERS if looks is not None and looks.is_new() else NOTHING_NEW
        units = dict.fromkeys(unit for staged, _ in courses for unit in staged.graph.units)
        try:
            with patched_units(self.root, tuple(units)):
                if train:
                    self.engine.train(count, boundaries)
                else:
                    self.engine.evaluate(count, boundaries)
            for index, text in self.writes.found().items():
                running.failures.setdefault(index, text)
            found = running.tails or []
            owners = NEW_OWNERS if self.finds_owners() else NOTHING_NEW
            news = max([kept, owners, *(staged.tails.look(tail) for staged, tail in found if staged.tails is not None)])
            self.news = max(self.news, require_no_departure(running.failures, *self.groups.host, news))
            self._tails += found
            return running.results if self.ends_here else []
        finally:
            self._running = None

    def accept_tails(self) -> None:
        """What ran behind the last unit since this was called is known from here on."""
        for staged in {id(staged): staged for staged, _ in self._tails}.values():
            staged.tails = staged.tails or KnownTails()
            staged.tails.accept([tail for its, tail in self._tails if its is staged])
        self._tails, self.news = [], NOTHING_NEW

    def watch_writes(self, step: Step, index: int) -> WriteWatch:
        """What a run of ``step`` on micro-batch ``index`` has to call before it writes in place."""

        def look(written: list[Any]) -> None:
            self.writes.index = index
            self.writes.look(written, step.follows)

        return look

    def run_stage(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One stage's part of one micro-batch of the running step."""
        running = self._running
        assert running is not None
        try:
            return self._run_replay(running, stage, index, received)
        except Exception as error:
            if not (isinstance(error, (ReplayError, SplitError)) or has_no_meaning(received)):
                raise
            running.failures.setdefault(index, str(error))
        if stage == self.num_stages - 1:
            return ()
        staged, shapes = running.courses[index]
        return without_meaning(staged.boundary(stage, shapes, running.train), self.device)

    def _run_replay(
        self, running: _Running, stage: int, index: int, received: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        microbatch, is_last = running.microbatches[index], stage == self.num_stages - 1
        staged, shapes = running.courses[index]
        tail = Tail(Replay.run.__code__) if is_last and running.tails is not None else None
        with running.step.around(index, microbatch, keep=is_last):
            sent, result = staged.replays[stage].run(
                lambda: running.step(microbatch),
                received,
                shapes,
                running.observe,
                answers=microbatch.answers,
                tail=tail,
                writes=self.watch_writes(running.step, index),
            )
        if running.tails is not None and tail is not None:
            running.tails.append((staged, tail))
        if not is_last:
            return sent
        loss = running.step.loss(microbatch, result) if running.train else None
        running.results[index] = map_leaves(_detached, result)
        return () if loss is None else (loss,)

    def survey(
        self, staged: StagedStep, step: Step, microbatch: MicroBatch, train: bool, index: int = 0
    ) -> Shapes | None:
        """What values look like for micro-batch ``index``: one forward pass, each stage telling the next. Collective.

        Returns:
            None on every rank if the step takes another course.

        Raises:
            Exception: on every rank, where a stage raises one: its own there, a ``RuntimeError`` elsewhere.
        """
        shapes, numbered = Shapes(values={}), (microbatch, index)
        received: list[Tensor] = []
        with preserve_state(self.root, self.device), patched_units(self.root, staged.graph.units):
            for stage, rank in enumerate(self.rank_of_stage):
                report: Any = None
                failure: Exception | None = None
                if rank == self.groups.pipeline_rank:
                    try:
                        report = self._survey_stage(staged.replays[stage], step, numbered, train, received, shapes)
                    except Exception as error:  # of the user's code: the others wait for a word
                        failure, report = error, {"failed": f"{type(error).__name__}: {error}"}
                report = broadcast_structure(report, self.groups.pipeline, rank, self.device)
                if "failed" in report:
                    raise failure or RuntimeError(f"Stage {stage} failed with {report['failed']}")
                if report["other_course"]:
                    return None
                shapes.merge(Shapes.from_json(report["shapes"]))
                live = staged.stage_cuts.live[stage] if stage < self.num_stages - 1 else ()
                received = report["sent"]
                for value, tensor in zip(live, received, strict=False):  # behind them may be what Python read
                    tensor.requires_grad_(train and shapes.values[value].requires_grad)
        return shapes

    def _survey_stage(
        self,
        replay: Replay,
        step: Step,
        numbered: tuple[MicroBatch, int],
        train: bool,
        received: Sequence[Tensor],
        shapes: Shapes,
    ) -> dict[str, Any]:
        found, (microbatch, index) = Shapes(values={}), numbered
        try:
            with torch.set_grad_enabled(train), step.around(index, microbatch, keep=replay.is_last):
                writes = self.watch_writes(step, index)
                sent, _ = replay.run(lambda: step(microbatch), received, shapes, record=found, writes=writes)
        except ReplayError:
            return {"other_course": True}
        finally:
            step.forget()
        return {"other_course": False, "shapes": found.to_json(), "sent": [tensor.detach() for tensor in sent]}


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
