"""A step cut into stages, and what the runtime has to know of it while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.foreign_writes import NewWrites
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.partition.cuts import StageCuts
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.remote import Boundary, Shapes, TensorSpec, count_told
from lightning_smddp.pipeline.runtime.replay import Observer, Replay, WriteWatch
from lightning_smddp.pipeline.runtime.tails import KnownTails, Tail


class Step(Protocol):
    """The user's step on one micro-batch."""

    def __call__(self, microbatch: MicroBatch) -> Any:
        """Run the step's code; returns what it returns."""
        ...

    def around(
        self,
        stage: int | None,
        index: int,
        microbatch: MicroBatch,
        keep: bool,
    ) -> AbstractContextManager[object]:
        """Around the run of ``stage``, or a run for nothing (None), of micro-batch ``index``.

        ``keep`` where the step ends.
        """
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


@dataclass
class StagedStep:
    """One path of a step, the modules and operations that it goes through in order, cut into stages.

    Attributes:
        graph: of the step on that path.
        stage_cuts: where it is cut.
        replays: by stage, for those of this rank.
        probe: runs the step's Python code without doing any node, see :func:`~.stage_graph.probe_plan`.
        tails: what is known to run behind the last module, where the step ends; None before the first batch.
    """

    graph: StepGraph
    stage_cuts: StageCuts
    replays: dict[int, Replay]
    probe: Replay
    tails: KnownTails | None = None

    def boundary(self, stage: int, shapes: Shapes, train: bool) -> Boundary:
        """The tensors that ``stage`` sends to the next one: live values first, then what control flow was told."""
        specs = []
        for value in self.stage_cuts.live[stage]:
            known = shapes.values[value]
            requires_grad = known.requires_grad and train
            specs.append(TensorSpec(known.shape, known.dtype, requires_grad))
        told = self.graph.told(self.stage_cuts.cuts[stage])
        if told:
            numbers = TensorSpec((count_told(told),), torch.int64, requires_grad=False)
            specs.append(numbers)
        return tuple(specs)


class TracedPath(NamedTuple):
    """The path that the step takes on a micro-batch, and what its values look like there."""

    staged: StagedStep
    shapes: Shapes


@dataclass
class RunningStep:
    """The step that a pipeline runs now, as all stages of this rank see it.

    Attributes:
        paths: of each micro-batch.
        step: the user's.
        microbatches: of the batch.
        train: whether there is a backward.
        writes: of the run so far; see :class:`NewWrites`.
        observe: called around each node that is done here.
        results: where the step ends here, what it returned for each micro-batch.
        failures: by micro-batch, how a stage here found the step on another path than expected.
        tails: where the step ends here, what ran behind the last module for each micro-batch; None if nobody asks.
    """

    paths: Sequence[TracedPath]
    step: Step
    microbatches: Sequence[MicroBatch]
    train: bool
    writes: NewWrites
    observe: Observer | None
    results: list[Any]
    failures: dict[int, str] = field(default_factory=dict)
    tails: list[tuple[StagedStep, Tail]] | None = None


def write_watch(writes: NewWrites, step: Step, index: int) -> WriteWatch:
    """What a run of ``step`` on micro-batch ``index`` has to call before it writes in place."""

    def look(written: list[Any]) -> None:
        writes.index = index
        writes.look(written, step.follows)

    return look
