"""The courses that a step takes, and what its values look like on each: known, or found out before the schedule starts.

What a step does between its units may depend on the batch: on its shapes, and on its values where Python code reads
them (is anything padded? how long is the longest row?), on what Python draws, and on the step's number, the epoch or
anything else that is the same on all ranks. All ranks have the same batch and draw the same, so all find the same
course, without talking to each other: they run the step's code once with nothing but ghosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_smddp.pipeline.ghosts import ReplayError, Shapes
from lightning_smddp.pipeline.microbatches import MicroBatch, signature
from lightning_smddp.pipeline.program import Program
from lightning_smddp.pipeline.replay import Replay, StagePlan, patched_units
from lightning_smddp.pipeline.splitting import Splitting
from lightning_smddp.pipeline.stage import Boundary, TensorSpec
from lightning_smddp.pipeline.told import count

if TYPE_CHECKING:
    from lightning_smddp.pipeline.runtime import PipelineRuntime, Step

_KEPT = 256  # kinds of micro-batches that are remembered,
_KEPT_OF_A_KIND = 16  # and courses of each


@dataclass
class StagedStep:
    """One course of a step, cut into stages: its program and this rank's replays."""

    program: Program
    splitting: Splitting
    replays: dict[int, Replay]
    rehearsal: Replay  # without any item

    def boundary(self, stage: int, shapes: Shapes, train: bool) -> Boundary:
        """What ``stage`` sends."""
        specs = []
        for value in self.splitting.live[stage]:
            known = shapes.values[value]
            specs.append(TensorSpec(known.shape, known.dtype, known.requires_grad and train))
        told = self.program.told(self.splitting.cuts[stage])
        if told:
            specs.append(TensorSpec((count(told),), torch.int64, False))
        return tuple(specs)


def rehearsal_plan(program: Program) -> StagePlan:
    """A stage that does nothing, and leaves at the last item that belongs to a stage for sure."""
    placed = [item.index for item in program.items if item.module is not None or item.parameters]
    end = min([placed[-1] if placed else 0, *(item.index for item in program.items if item.blinds)])
    return StagePlan(-1, end, end, frozenset(), (), ())


Course = tuple[StagedStep, Shapes]


@dataclass
class Variants:
    """All known courses of one step.

    Args:
        runtime: of this rank.
        steps: the known ones, at least one.
        retrace: traces the step on a micro-batch that no known course fits. Collective.
        train: whether the step has a backward.
    """

    runtime: PipelineRuntime
    steps: list[StagedStep]
    retrace: Callable[[Any, MicroBatch, int], StagedStep]
    train: bool
    _courses: dict[str, list[tuple[tuple[str, ...] | None, Course]]] = field(default_factory=dict)
    _now: dict[str, Course] = field(default_factory=dict)  # in this batch, where all micro-batches take the same
    unforeseen: bool = False  # a course was found since this was False that shapes do not explain
    _unrehearsed: bool = False  # code that cannot be run with ghosts alone
    _parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        """Collect the parameters once: it takes longer than to look at them."""
        self._parameters = list(self.runtime.root.parameters())

    def remember(self, staged: StagedStep, step: Step, microbatch: MicroBatch, index: int = 0) -> Course:
        """``staged`` was traced with a micro-batch like this."""
        return self._keep(self._key(microbatch), (staged, Shapes.of(staged.program)), step, microbatch, index)

    def find(self, step: Step, microbatch: MicroBatch, index: int = 0) -> Course:
        """The course that ``step`` takes on micro-batch ``index``. Collective over the pipeline if it is new.

        Raises:
            ReplayError: on every rank, if it takes another course each time.
        """
        key = self._key(microbatch)
        if index == 0:
            self._now.clear()
        if key in self._now:
            return self._now[key]
        for known, course in self._courses.get(key, []):
            if self._unrehearsed or self._rehearse(course, step, microbatch, index) == known:
                return self._take(key, course)
        self.unforeseen |= key in self._courses
        for staged in self.steps:
            shapes = self.runtime.survey(staged, step, microbatch, self.train, index)
            if shapes is not None:
                return self._keep(key, (staged, shapes), step, microbatch, index)
        self.unforeseen = True
        staged = self.retrace(step, microbatch, index)
        self.steps.append(staged)
        return self.remember(staged, step, microbatch, index)

    def _keep(self, key: str, course: Course, step: Step, microbatch: MicroBatch, index: int) -> Course:
        history = self._rehearse(course, step, microbatch, index)
        if history is None and self._varies():
            raise ReplayError(
                "The step takes another course each time that it is run on the same batch, so that stages "
                "cannot agree. What it does between modules may depend on the batch, not on torch's random numbers."
            )
        self._unrehearsed = history is None
        while len(self._courses) >= _KEPT and key not in self._courses:
            del self._courses[next(iter(self._courses))]
        known = self._courses.setdefault(key, [])
        del known[_KEPT_OF_A_KIND - 1 :]
        known.insert(0, (history, course))
        return self._take(key, course)

    def _take(self, key: str, course: Course) -> Course:
        """Other micro-batches of this batch take the same, if nothing that differs between them decides."""
        if not self._varies():
            self._now[key] = course
        return course

    def _varies(self) -> bool:
        return any(staged.program.reads_of_batch or staged.program.draws for staged in self.steps)

    def _rehearse(self, course: Course, step: Step, microbatch: MicroBatch, index: int) -> tuple[str, ...] | None:
        """What Python code reads of the batch on this course; None if the step leaves it."""
        staged, shapes = course
        reads: list[str] = []
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.set_grad_enabled(self.train),
                patched_units(self.runtime.root, staged.program.units),
                step.around(index, microbatch, keep=False),
            ):
                staged.rehearsal.run(lambda: step(microbatch), (), shapes, reads=reads, answers=microbatch.answers)
        except ReplayError:
            return None
        return tuple(reads) or ("",)

    def _key(self, microbatch: MicroBatch) -> str:
        frozen = "".join("01"[p.requires_grad] for p in self._parameters)
        return f"{signature(microbatch)}|{frozen}"
