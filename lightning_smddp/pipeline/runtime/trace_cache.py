"""The courses that a step takes, and what its values look like on each: known, or found out before the schedule starts.

What a step does between its units may depend on the batch: on its shapes, and on its values where Python code reads
them (is anything padded? how long is the longest row?), on what Python draws, and on the step's number, the epoch or
anything else that is the same on all ranks. All ranks have the same batch and draw the same, so all find the same
course, without talking to each other: they run the step's code once with nothing but ghosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.foreign_writes import NEW_WRITE
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.partition.cuts import StageCuts
from lightning_smddp.pipeline.partition.fingerprint import same_everywhere
from lightning_smddp.pipeline.partition.kept_numbers import KeptNumbers
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, signature
from lightning_smddp.pipeline.runtime.remote import OTHER_COURSE, ReplayError, Shapes
from lightning_smddp.pipeline.runtime.replay import Replay, StagePlan, patched_units
from lightning_smddp.pipeline.runtime.stage import Boundary, TensorSpec
from lightning_smddp.pipeline.runtime.tails import KnownTails
from lightning_smddp.pipeline.runtime.told import count
from lightning_smddp.wire.gather import gather_json

if TYPE_CHECKING:
    from lightning_smddp.pipeline.runtime.step_runtime import PipelineRuntime, Step

_KEPT = 256  # kinds of micro-batches that are remembered,
_KEPT_OF_A_KIND = 16  # and courses of each
_OFTEN, _SELDOM = 4, 20  # a course that is left more often, and in more than one of so many batches, is none


@dataclass
class StagedStep:
    """One course of a step, cut into stages: its graph and this rank's replays."""

    graph: StepGraph
    stage_cuts: StageCuts
    replays: dict[int, Replay]
    rehearsal: Replay  # without any item
    tails: KnownTails | None = None  # where it ends; None before the first batch

    def boundary(self, stage: int, shapes: Shapes, train: bool) -> Boundary:
        """What ``stage`` sends."""
        specs = []
        for value in self.stage_cuts.live[stage]:
            known = shapes.values[value]
            specs.append(TensorSpec(known.shape, known.dtype, known.requires_grad and train))
        told = self.graph.told(self.stage_cuts.cuts[stage])
        if told:
            specs.append(TensorSpec((count(told),), torch.int64, False))
        return tuple(specs)


def rehearsal_plan(graph: StepGraph) -> StagePlan:
    """A stage that does nothing, and leaves at the last item that belongs to a stage for sure."""
    placed = [item.index for item in graph.nodes if item.module is not None or item.parameters]
    end = min([placed[-1] if placed else 0, *(item.index for item in graph.nodes if item.blinds)])
    return StagePlan(-1, end, end, frozenset(), (), ())


TracedPath = tuple[StagedStep, Shapes]


@dataclass
class TraceCache:
    """All known courses of one step.

    Args:
        runtime: of this rank.
        steps: the known ones, at least one.
        retrace: traces the step on a micro-batch that no known course fits. Collective.
        train: whether the step has a backward.
        kept: numbers of modules, as they were when weights and rules were found.
    """

    runtime: PipelineRuntime
    steps: list[StagedStep]
    retrace: Callable[[Any, MicroBatch, int], StagedStep]
    train: bool
    kept: KeptNumbers
    _courses: dict[str, list[tuple[tuple[str, ...] | None, TracedPath]]] = field(default_factory=dict)
    _now: dict[str, TracedPath] = field(default_factory=dict)  # in this batch, where all micro-batches take the same
    unforeseen: bool = False  # a course was found since this was False that shapes do not explain
    _unrehearsed: bool = False  # code that cannot be run with ghosts alone
    _found: int = 0  # batches whose courses were looked for,
    _left: int = 0  # and how often one of them was not what the step did
    _draws_anew: bool = False  # the last rehearsal, torch's random numbers where the graph knows of none
    _reason: str = ""  # why no known course was the one of a micro-batch
    _parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        """Collect the parameters once: it takes longer than to look at them."""
        self._parameters = list(self.runtime.root.parameters())

    def remember(self, staged: StagedStep, step: Step, microbatch: MicroBatch, index: int = 0) -> TracedPath:
        """``staged`` was traced with a micro-batch like this."""
        return self._keep(self._key(microbatch), (staged, Shapes.of(staged.graph)), step, microbatch, index)

    def find(self, step: Step, microbatches: Sequence[MicroBatch]) -> list[TracedPath]:
        """The course that ``step`` takes on each micro-batch of a batch. Collective over the pipeline.

        Raises:
            RuntimeError: on every rank, if it takes another course on one alone.
            SplitError: on every rank, if it takes another course each time.
        """
        self._now.clear()
        self._found += 1
        courses: list[TracedPath] = []
        while len(courses) < len(microbatches):
            found = self._find_known(step, microbatches, len(courses))
            self._require_same_courses(found)
            courses += found
            if len(courses) < len(microbatches):
                courses.append(self._discover(step, microbatches[len(courses)], len(courses)))
        return courses

    def _find_known(self, step: Step, microbatches: Sequence[MicroBatch], begin: int) -> list[TracedPath]:
        """Those of the micro-batches from ``begin`` on, up to the first whose course is not known."""
        found: list[TracedPath] = []
        for index in range(begin, len(microbatches)):
            course = self._look_up(step, microbatches[index], index)
            if course is None:
                break
            found.append(course)
        return found

    def _look_up(self, step: Step, microbatch: MicroBatch, index: int) -> TracedPath | None:
        key = self._key(microbatch)
        if key in self._now:
            return self._now[key]
        self._reason = "It has a batch of a new kind."
        for known, course in self._courses.get(key, []):
            if self._unrehearsed:
                return self._take(key, course)
            history = self._rehearse(course, step, microbatch, index)
            if history == known:
                return self._take(key, course)
            if history is not None:
                self._reason = f"It comes to {_first_new(history, known or ())}."
        return None

    def _require_same_courses(self, found: Sequence[TracedPath]) -> None:
        """Raise ``RuntimeError`` on every rank if one goes another way: others would wait for it. Collective."""
        group, device = self.runtime.groups.host
        if group.size() == 1:
            return
        numbers = [next(i for i, staged in enumerate(self.steps) if staged is course[0]) for course in found]
        if same_everywhere(numbers, group, device):
            return
        everyones = gather_json([numbers, self._reason], group, device)
        first = everyones[0][0]
        rank = next(rank for rank, (theirs, _) in enumerate(everyones) if theirs != first)
        theirs, reason = everyones[rank]
        if len(first) < len(theirs):
            rank, reason = 0, everyones[0][1]
        elif len(first) == len(theirs):
            here, there = next(pair for pair in zip(theirs, first, strict=True) if pair[0] != pair[1])
            reason = self.steps[here].graph.difference_from(self.steps[there].graph)
        raise RuntimeError(
            f"The step takes another course on rank {rank} of the pipeline than on others: {reason} What a step does "
            "may depend on the batch, on random numbers, on the epoch and the step's number, but not on the rank, the "
            "process or the time."
        )

    def _discover(self, step: Step, microbatch: MicroBatch, index: int) -> TracedPath:
        """A course that no rank knows for micro-batches like this one. Collective."""
        self.unforeseen |= self._key(microbatch) in self._courses
        for staged in self.steps:
            if (course := self._survey(staged, step, microbatch, index)) is not None:
                return course
        self.unforeseen = True
        staged = self.retrace(step, microbatch, index)
        self.steps.append(staged)
        return self.remember(staged, step, microbatch, index)

    def _survey(self, staged: StagedStep, step: Step, microbatch: MicroBatch, index: int) -> TracedPath | None:
        shapes = self.runtime.survey(staged, step, microbatch, self.train, index)
        if shapes is None:
            return None
        self._rehearse((staged, shapes), step, microbatch, index)
        if self._draws_anew:  # each stage would draw other numbers
            return None
        return self._keep(self._key(microbatch), (staged, shapes), step, microbatch, index)

    def learn(
        self, step: Step, microbatches: Sequence[MicroBatch], courses: Sequence[TracedPath], failures: Mapping[int, str]
    ) -> None:
        """Find the course of a micro-batch that left the one that was found for it, behind its last module. Collective.

        Args:
            step: the user's.
            microbatches: of the batch.
            courses: that were found for them.
            failures: by micro-batch, how it left its course.

        Raises:
            SplitError: on every rank: there is none that stages can follow, or it changes too often.
        """
        index = min(failures)
        self._left += 1
        if self._left > _OFTEN and self._left * _SELDOM > self._found:
            raise SplitError(failures[index])
        others = [staged for staged in reversed(self.steps) if staged is not courses[index][0]]
        if failures[index].startswith(NEW_WRITE):
            others = []
        for staged in others:
            if self._survey(staged, step, microbatches[index], index) is not None:
                return
        staged = self.retrace(step, microbatches[index], index)
        if any(staged.graph.digest() == known.graph.digest() for known in self.steps):
            if failures[index].startswith(NEW_WRITE):
                return  # nothing that was there before is written
            raise SplitError(failures[index])
        self.unforeseen = True
        self.steps.append(staged)
        self.remember(staged, step, microbatches[index], index)

    def _keep(self, key: str, course: TracedPath, step: Step, microbatch: MicroBatch, index: int) -> TracedPath:
        history = self._rehearse(course, step, microbatch, index)
        if self._varies():
            self._require_rehearsed(history)
        self._unrehearsed = history is None
        while len(self._courses) >= _KEPT and key not in self._courses:
            del self._courses[next(iter(self._courses))]
        known = self._courses.setdefault(key, [])
        del known[_KEPT_OF_A_KIND - 1 :]
        known.insert(0, (history, course))
        return self._take(key, course)

    def _require_rehearsed(self, history: tuple[str, ...] | None) -> None:
        """Raise ``SplitError`` on every rank if the course that was just found cannot be found again. Collective."""
        group, device = self.runtime.groups.pipeline, self.runtime.device
        reasons = gather_json(self._reason if history is None else None, group, device)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            raise SplitError(
                "The step takes another course each time that it is run on the same batch, so that stages cannot "
                f"agree: {reason} What it does between modules may depend on the batch, not on other random numbers."
            )

    def _take(self, key: str, course: TracedPath) -> TracedPath:
        """Other micro-batches of this batch take the same, if nothing that differs between them decides."""
        if not self._varies():
            self._now[key] = course
        return course

    def _varies(self) -> bool:
        return any(staged.graph.reads_of_batch or staged.graph.draws for staged in self.steps)

    def _rehearse(self, course: TracedPath, step: Step, microbatch: MicroBatch, index: int) -> tuple[str, ...] | None:
        """What Python code reads of the batch on this course; None if the step leaves it."""
        staged, shapes = course
        self._draws_anew = False
        reads: list[str] = []
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.set_grad_enabled(self.train),
                patched_units(self.runtime.root, staged.graph.units),
                step.around(index, microbatch, keep=False),
            ):
                before = self._torch_states()
                staged.rehearsal.run(
                    lambda: step(microbatch),
                    (),
                    shapes,
                    reads=reads,
                    answers=microbatch.answers,
                    writes=self.runtime.watch_writes(step, index),
                )
                self._draws_anew = not staged.graph.shares_draws and any(
                    not torch.equal(a, b) for a, b in zip(before, self._torch_states(), strict=True)
                )
        except ReplayError as error:
            self._reason = str(error).partition(f" {OTHER_COURSE}")[0]
            return None
        if self._draws_anew:
            self._reason = "It draws random numbers where it drew none."
            return None
        return tuple(reads)

    def _torch_states(self) -> list[Tensor]:
        device = self.runtime.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    def _key(self, microbatch: MicroBatch) -> str:
        frozen = "".join("01"[p.requires_grad] for p in self._parameters)
        return f"{signature(microbatch)}|{frozen}"


def _first_new(history: Sequence[str], known: Sequence[str]) -> str:
    """The first read in ``history`` that is another one in ``known``."""
    pairs = zip_longest(history, known, fillvalue="the end")
    return next((here for here, there in pairs if here != there), "the end")
