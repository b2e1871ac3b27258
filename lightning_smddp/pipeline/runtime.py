"""The steps of one rank of a pipeline: which program, which stages, which shapes, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.broadcast import broadcast_structure
from lightning_smddp.pipeline.engine import PipelineEngine
from lightning_smddp.pipeline.microbatches import MicroBatch, signature
from lightning_smddp.pipeline.placement import Groups
from lightning_smddp.pipeline.program import Program
from lightning_smddp.pipeline.replay import Observer, Replay, Shapes, patched_units
from lightning_smddp.pipeline.schedules import Schedule
from lightning_smddp.pipeline.spans import Recorder
from lightning_smddp.pipeline.splitting import Splitting
from lightning_smddp.pipeline.structure import map_leaves
from lightning_smddp.pipeline.stage import Boundary, TensorSpec
from lightning_smddp.pipeline.untouched import untouched

_KEPT_SHAPES = 256  # signatures of micro-batches whose shapes are remembered


class Step(Protocol):
    """The user's step on one micro-batch."""

    def __call__(self, microbatch: MicroBatch) -> Any:
        """Run the step's code; returns what it returns."""
        ...

    def around(self, index: int, microbatch: MicroBatch, keep: bool) -> AbstractContextManager[object]:
        """Around each stage's replay of micro-batch ``index``; ``keep`` on the stage that sees the step's end."""
        ...

    def loss(self, microbatch: MicroBatch, result: Any) -> Tensor:
        """The loss to differentiate, weighted: the batch's loss is their sum. Called where the step ends."""
        ...


@dataclass
class StagedStep:
    """One step cut into stages: its program, this rank's replays, and shapes by signature."""

    program: Program
    splitting: Splitting
    replays: dict[int, Replay]
    shapes: dict[str, Shapes] = field(default_factory=dict)

    def boundary(self, stage: int, shapes: Shapes, train: bool) -> Boundary:
        """What ``stage`` sends."""
        specs = []
        for value in self.splitting.live[stage]:
            known = shapes.values[value]
            specs.append(TensorSpec(known.shape, known.dtype, known.requires_grad and train))
        return tuple(specs)


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

    staged: StagedStep
    step: Step
    microbatches: Sequence[MicroBatch]
    shapes: list[Shapes]
    train: bool
    results: list[Any]
    observe: Observer | None


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
        self.here = [stage for stage, rank in enumerate(self.rank_of_stage) if rank == groups.place]
        self.last_rank = self.rank_of_stage[-1]
        self.checkpointing = checkpointing
        bodies = {stage: _Body(stage, stage_parameters[stage], self) for stage in self.here}
        self.engine = PipelineEngine(groups.pipeline, device, schedule, num_stages, bodies, recorder=recorder)
        self._running: _Running | None = None

    @property
    def ends_here(self) -> bool:
        """Whether this rank's replay sees the end of the step."""
        return self.last_rank == self.groups.place

    def stage(self, program: Program, splitting: Splitting) -> StagedStep:
        """This rank's part of a step."""
        plans = splitting.plans(len(program.items))
        replays = {s: Replay(program, plans[s], self.root, self.device, self.checkpointing) for s in self.here}
        return StagedStep(program, splitting, replays)

    def run(
        self,
        staged: StagedStep,
        step: Step,
        microbatches: Sequence[MicroBatch],
        train: bool,
        observe: Observer | None = None,
    ) -> list[Any]:
        """Run one step: forward, and in training backward, of all micro-batches. Collective over the pipeline.

        Returns:
            What the step returned for each micro-batch, on the rank where it ends; else an empty list.
        """
        shapes = [self._shapes(staged, step, microbatch, train) for microbatch in microbatches]
        boundaries = [[staged.boundary(s, known, train) for s in range(self.num_stages - 1)] for known in shapes]
        count = len(microbatches)
        self._running = _Running(staged, step, microbatches, shapes, train, [None] * count, observe)
        try:
            with patched_units(self.root, staged.program.units):
                if train:
                    self.engine.train(count, boundaries)
                else:
                    self.engine.evaluate(count, boundaries)
            return self._running.results if self.ends_here else []
        finally:
            self._running = None

    def run_stage(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One stage's part of one micro-batch of the running step."""
        running = self._running
        assert running is not None
        microbatch, is_last = running.microbatches[index], stage == self.num_stages - 1
        replay = running.staged.replays[stage]
        with running.step.around(index, microbatch, keep=is_last):
            sent, result = replay.run(lambda: running.step(microbatch), received, running.shapes[index], running.observe)
        if not is_last:
            return sent
        loss = running.step.loss(microbatch, result) if running.train else None
        running.results[index] = map_leaves(_detached, result)
        return () if loss is None else (loss,)

    def _shapes(self, staged: StagedStep, step: Step, microbatch: MicroBatch, train: bool) -> Shapes:
        """What values look like for a micro-batch like this; found out by a run through the stages if it is new."""
        key = self._key(microbatch, train)
        known = staged.shapes.pop(key, None)
        if known is None:
            known = self._survey(staged, step, microbatch, train)
            while len(staged.shapes) >= _KEPT_SHAPES:
                del staged.shapes[next(iter(staged.shapes))]
        staged.shapes[key] = known  # the most recently used one is last
        return known

    def _key(self, microbatch: MicroBatch, train: bool) -> str:
        frozen = "".join("01"[p.requires_grad] for p in self.root.parameters())
        return f"{signature(microbatch)}|{frozen}|{train}"

    def remember(self, staged: StagedStep, microbatch: MicroBatch, train: bool) -> None:
        """The program was traced with a micro-batch like this."""
        staged.shapes[self._key(microbatch, train)] = Shapes.of(staged.program)

    def _survey(self, staged: StagedStep, step: Step, microbatch: MicroBatch, train: bool) -> Shapes:
        """One forward pass through the stages in turn, each telling the next what its values look like. Collective."""
        shapes = Shapes(values={})
        received: list[Tensor] = []
        with untouched(self.root, self.device), patched_units(self.root, staged.program.units):
            for stage, rank in enumerate(self.rank_of_stage):
                report: Any = None
                if rank == self.groups.place:
                    found = Shapes(values={})
                    with torch.set_grad_enabled(train), step.around(0, microbatch, keep=False):
                        sent, _ = staged.replays[stage].run(
                            lambda: step(microbatch), received, shapes, record=found
                        )
                    report = {"shapes": found.to_json(), "sent": [t.detach() for t in sent]}
                report = broadcast_structure(report, self.groups.pipeline, rank, self.device)
                shapes.merge(Shapes.from_json(report["shapes"]))
                received = [
                    t.requires_grad_(train and shapes.values[v].requires_grad)
                    for v, t in zip(staged.splitting.plans(len(staged.program.items))[stage].sends, report["sent"], strict=True)
                ]
        return shapes




def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
