"""A step cut into stages, and what the runtime has to know of it while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.remote import Boundary, Shapes, TensorSpec
from lightning_smddp.pipeline.runtime.stage_graph import StagePlan
from lightning_smddp.pipeline.runtime.stage_program import Observer, StageProgram
from lightning_smddp.pipeline.runtime.step_exchange import Failure


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

    def seed_of(self, index: int) -> int:
        """The seed of the random numbers of micro-batch ``index``, the same on all ranks of the pipeline."""
        ...

    def forget(self) -> None:
        """Throw away what was kept of replays so far."""
        ...

    def loss(self, microbatch: MicroBatch, result: Any) -> Tensor | None:
        """The loss to differentiate, weighted: the batch's loss is their sum. Called where the step ends."""
        ...


@dataclass
class StagedStep:
    """One path of a step, the modules and operations that it goes through in order, cut into stages.

    Attributes:
        graph: of the step on that path.
        stages: what each stage does.
        replays: by stage, for those of this rank.
        probe: runs the step's Python code without doing any node, see :func:`~.stage_graph.probe_plan`.
    """

    graph: StepGraph
    stages: tuple[StagePlan, ...]
    replays: dict[int, StageProgram]
    probe: StageProgram

    def boundary(self, stage: int, shapes: Shapes, train: bool) -> Boundary:
        """The tensors that ``stage`` sends to the next one."""
        known_boundary = shapes.boundaries.get((stage, train))
        if known_boundary is not None:
            return known_boundary
        specs = []
        for value in self.stages[stage].sends:
            known = shapes.values[value]
            requires_grad = known.requires_grad and train
            specs.append(TensorSpec(known.shape, known.dtype, requires_grad))
        shapes.boundaries[stage, train] = boundary = tuple(specs)
        return boundary


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
        observe: called around each node that is done here.
        results: where the step ends here, what it returned for each micro-batch.
        failures: on stages here. Behind the first one nothing is computed here any more.
    """

    paths: Sequence[TracedPath]
    step: Step
    microbatches: Sequence[MicroBatch]
    train: bool
    observe: Observer | None
    results: list[Any]
    failures: list[Failure] = field(default_factory=list)
