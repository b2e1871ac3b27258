"""The paths that a step takes, and what its values look like on each: known, or found out before the schedule starts.

What a step does between its units may depend on the batch: on its shapes, and on its values where Python code reads
them (is anything padded? how long is the longest row?), on what Python draws, and on the step's number, the epoch or
anything else that is the same on all ranks. The pipeline's first rank finds the path, by a run of the step's code
without doing any node (a *dry run*), and sends its number to the others. Only a new path is looked at by all.

What a dry run reads of the batch are the *guards* of a path. A micro-batch takes a known path if it has the same kind
(shapes, types, frozen parameters) and the same guards. Else shapes are inferred on the paths that are known, by one
forward pass, stage by stage; where the step follows none of them, it is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import without_subclass_functions
from lightning_smddp.communication.objects import RankFailedError, broadcast, each, gather, to_cpu
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, MicroBatches, signature
from lightning_smddp.pipeline.runtime.engine import PipelineRuntime
from lightning_smddp.pipeline.runtime.remote_tensor import OTHER_PATH, ReplayError
from lightning_smddp.pipeline.runtime.stage_program import Shapes, StagedStep, StageProgram, Step, TracedPath
from lightning_smddp.pipeline.runtime.step_run import run_stage

_KEPT = 1024  # paths that are remembered,
_KEPT_OF_A_KIND = 16  # and paths for one kind of micro-batch
_ROOM = 64  # numbers of paths in a message, or a multiple
_UNKNOWN, _FAILED = -1, -2  # in place of such numbers
_MOST_PATHS = 16  # that are traced of one step: one that goes on finding new ones would be traced for ever

Guards: TypeAlias = tuple[str, ...] | None
"""What Python code reads of the batch on a path; None for code that has no dry run."""


def _run_stage(
    program: StageProgram | None,
    step: Step,
    microbatch: MicroBatch,
    index: int,
    received: Sequence[Tensor],
    shapes: Shapes,
) -> tuple[Shapes, list[Tensor]] | None:
    """For all ranks: the shapes that a stage has found, and what it sends. ``shapes``: of earlier stages.

    None if the step takes another path, or the stage is on another rank.
    """
    if program is None:
        return None
    found = Shapes()
    try:
        with step.around(None, index, microbatch, keep=program.is_last):
            sent, _ = run_stage(program, lambda: step(microbatch), received, shapes, step.seed_of(index), made=found)
    except ReplayError:
        return None
    finally:
        step.forget()
    return found, to_cpu(list(sent))


@dataclass
class TraceCache:
    """All known paths of one step.

    Args:
        runtime: of this rank.
        steps: the known ones, at least one.
        retrace: traces the step on a micro-batch that no known path fits. Collective.
        train: whether the step has a backward.
        counts: whether the step changes numbers of its own, which may decide in the next micro-batch.
    """

    runtime: PipelineRuntime
    steps: list[StagedStep]
    retrace: Callable[[Any, MicroBatch, int], StagedStep]
    train: bool
    counts: Callable[[], bool]
    _paths: dict[str, list[tuple[Guards, TracedPath]]] = field(default_factory=dict)  # by kind of micro-batch
    _now: dict[str, TracedPath] = field(default_factory=dict)  # in this batch, where all micro-batches take the same
    _reason: str = ""  # why no known path was the one of a micro-batch
    _news: list[str] = field(default_factory=list)  # such reasons, where a path was new
    _trained: str = ""  # for each parameter whether it needs a gradient
    _parameters: list[nn.Parameter] = field(init=False)
    _known: dict[int, TracedPath] = field(default_factory=dict)  # by number
    _numbers: Iterator[int] = field(default_factory=count)
    _told: Any = None  # the last such numbers, on their way to the other ranks

    def __post_init__(self) -> None:
        """Collect the parameters once: it takes longer than to look at them."""
        self._parameters = list(self.runtime.root.parameters())

    def remember(self, staged: StagedStep, step: Step, microbatch: MicroBatch, index: int = 0) -> TracedPath:
        """``staged`` was traced with a micro-batch like this."""
        self._look_at_parameters()
        path = staged.path(Shapes.of(staged.graph), next(self._numbers), self.train)
        guards, reason = self._guards_of(path, step, microbatch, index)
        if reason is not None:
            raise SplitError(
                "The step takes another path each time that it is run on the same batch, so that stages cannot agree: "
                f"{reason} What it does between modules may depend on the batch, not on other random numbers."
            )
        return self._keep(path, guards, microbatch)

    def find(self, step: Step, microbatches: MicroBatches) -> list[TracedPath]:
        """The path that ``step`` takes on each micro-batch of a batch. Collective over the pipeline.

        Raises:
            SplitError: on every rank, if it takes another path each time.
        """
        self._now.clear()
        self._look_at_parameters()
        paths: list[TracedPath] = []
        while len(paths) < len(microbatches):
            paths += self._find_known(step, microbatches, len(paths))
            index = len(paths)
            if index < len(microbatches):
                paths.append(self._discover(step, microbatches[index], index))
        return paths

    # ---- paths that are known ----

    def _find_known(self, step: Step, microbatches: MicroBatches, begin: int) -> list[TracedPath]:
        """Those of the micro-batches from ``begin`` on, up to the first whose path the first rank does not know.

        The first rank alone looks, and waits for no other. A rank whose code goes elsewhere finds that in its run, and
        all ranks hear of it behind the schedule. If each looked for itself, one that knows a path would begin the
        schedule, while another waits for it to be traced.
        """
        group = self.runtime.groups.host.group
        # Rounded up: for ranks with another number of micro-batches, which is an error behind the schedule.
        room = -(-len(microbatches) // _ROOM) * _ROOM
        message = torch.full((room,), _FAILED)
        if group.rank() == 0:
            try:
                numbers = self._look_up_all(step, microbatches, begin)
                message = torch.tensor(numbers + [_UNKNOWN] * (room - len(numbers)))
            finally:  # it goes on; what it sends has to live until it has arrived
                self._told = [dist.isend(message, group=group, group_dst=rank) for rank in range(1, group.size())]
        else:
            dist.recv(message, group=group, group_src=0)
        numbers = message.tolist()
        if numbers[0] == _FAILED:
            self._look_up_all(step, microbatches, begin)  # raises what was raised there
            raise RankFailedError(0, "The step failed on the first rank of the pipeline, and not on this one.")
        return [self._known[number] for number in numbers if number != _UNKNOWN]

    def _look_up_all(self, step: Step, microbatches: MicroBatches, begin: int) -> list[int]:
        """The numbers of the paths of the micro-batches from ``begin`` on, up to the first that is not known here."""
        numbers: list[int] = []
        for index in range(begin, len(microbatches)):
            path = self._look_up(step, microbatches[index], index)
            if path is None:
                break
            numbers.append(path.number)
        return numbers

    def _look_up(self, step: Step, microbatch: MicroBatch, index: int) -> TracedPath | None:
        # Cheap questions first, as this is asked before every step: the kind is a string of shapes, and only paths on
        # which Python reads the batch, or draws, need a run of the user's code.
        kind = self._kind(microbatch)
        if kind in self._now:
            return self._now[kind]
        self._reason = "It has a batch of a new kind."
        for known, path in self._paths.get(kind, []):
            guards = self._dry_run(path, step, microbatch, index)
            if guards == known:
                return self._take(kind, path)
            if guards is not None:
                pairs = zip_longest(guards, known or (), fillvalue="the end")
                new = next((here for here, there in pairs if here != there), "the end")
                self._reason = f"It comes to {new}."
        return None

    def _take(self, kind: str, path: TracedPath) -> TracedPath:
        """Other micro-batches of this batch take the same, if nothing that differs between them decides."""
        if not self._varies() and not self.counts():
            self._now[kind] = path
        return path

    def _varies(self) -> bool:
        return any(staged.graph.reads_batch or staged.graph.draws for staged in self.steps)

    def _kind(self, microbatch: MicroBatch) -> str:
        """What shapes follow from: those of the micro-batch, and which parameters are trained."""
        return f"{signature(microbatch.value)}|{self._trained}"

    def _look_at_parameters(self) -> None:
        with without_subclass_functions():
            self._trained = "".join(["01"[parameter.requires_grad] for parameter in self._parameters])

    # ---- new paths ----

    def _discover(self, step: Step, microbatch: MicroBatch, index: int) -> TracedPath:
        """A path that no rank knows for micro-batches like this one. Collective."""
        for staged in self.steps:
            path = self._infer(staged, step, microbatch, index)
            if path is not None:
                return path
        self._news.append(self._reason)
        if len(self.steps) >= _MOST_PATHS:
            self._refuse_more()
        staged = self.retrace(step, microbatch, index)
        self.steps.append(staged)
        return self.remember(staged, step, microbatch, index)

    def _refuse_more(self) -> None:
        """Raise ``SplitError`` on every rank, with what led to the last two paths. Collective."""
        last = broadcast(self._news[-2:], self.runtime.groups.host.group)
        raise SplitError(
            f"The step took {_MOST_PATHS} paths, each of which was traced, and now takes another one. The last two "
            f"differ by this: {' '.join(last)} Let fewer things decide what it does between modules, put that code "
            "into one module, or use strategy='smddp'."
        )

    def _infer(self, staged: StagedStep, step: Step, microbatch: MicroBatch, index: int) -> TracedPath | None:
        """The path of ``staged`` with the shapes of this micro-batch; None on every rank if the step takes another one.

        Each stage runs once, with what the stages before have told: the shapes of their values, and what they send.

        Raises:
            Exception: on every rank, where a stage raises one.
        """
        runtime, shapes = self.runtime, Shapes()
        received: list[Tensor] = []
        with (
            preserve_state(runtime.root, runtime.device),
            runtime.wrappers.active([staged.graph]),
            torch.set_grad_enabled(self.train),
        ):
            for stage, rank in enumerate(runtime.rank_of_stage):
                program = staged.programs.get(stage)  # the others wait
                act = partial(_run_stage, program, step, microbatch, index, received, shapes)
                told = each(act, runtime.groups.host.group)[rank]
                if told is None:
                    return None
                found, sent = told
                shapes.merge(found)
                received = [tensor.to(runtime.device) for tensor in sent]
                # They require gradients as in training: what is made of them then does so, too.
                for value, tensor in zip(staged.stages[stage].sends, received, strict=True):
                    tensor.requires_grad_(self.train and shapes.values[value].requires_grad)
        # Units fit, and so do shapes. Code between them, which is one stage's own, may still do something else.
        path = staged.path(shapes, next(self._numbers), self.train)
        guards, reason = self._guards_of(path, step, microbatch, index)
        return self._keep(path, guards, microbatch) if reason is None else None

    def _guards_of(self, path: TracedPath, step: Step, microbatch: MicroBatch, index: int) -> tuple[Guards, str | None]:
        """What is read on ``path``; where paths vary, also why a rank cannot find it again. Collective then."""
        guards = self._dry_run(path, step, microbatch, index)
        if not self._varies():
            return guards, None
        reasons = gather(self._reason if guards is None else None, self.runtime.groups.pipeline)
        return guards, next(filter(None, reasons), None)

    def _keep(self, path: TracedPath, guards: Guards, microbatch: MicroBatch) -> TracedPath:
        """Remember ``path`` for micro-batches like this; where there are too many, all others are forgotten."""
        kind = self._kind(microbatch)
        if len(self._known) >= _KEPT:
            for remembered in (self._known, self._paths, self._now):
                remembered.clear()
        self._known[path.number] = path
        # The path that was found last is asked for first.
        self._paths[kind] = [(guards, path), *self._paths.get(kind, [])][:_KEPT_OF_A_KIND]
        return self._take(kind, path)

    # ---- dry runs ----

    def _dry_run(self, path: TracedPath, step: Step, microbatch: MicroBatch, index: int) -> Guards:
        """What Python code reads of the batch on this path; None if the step leaves it, or has no dry run."""
        staged = path.staged
        # Nothing of a dry run may stay: torch's random numbers are put back, and the step is told to keep nothing of
        # what its code shows.
        reads: list[str] = []
        try:
            with (
                torch.set_grad_enabled(self.train),
                self.runtime.wrappers.active([staged.graph]),
                self.runtime.wrappers.generators.preserved(),
                step.around(None, index, microbatch, keep=False),
            ):
                run_stage(staged.dry_run, lambda: step(microbatch), (), path.shapes, step.seed_of(index), reads=reads)
        except ReplayError as error:
            self._reason, _, _ = str(error).partition(f" {OTHER_PATH}")
            return None
        return tuple(reads)
