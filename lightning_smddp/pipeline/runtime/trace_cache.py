"""The paths that a step takes, and what its values look like on each: known, or found out before the schedule starts.

What a step does between its units may depend on the batch: on its shapes, and on its values where Python code reads
them (is anything padded? how long is the longest row?), on what Python draws, and on the step's number, the epoch or
anything else that is the same on all ranks. All ranks have the same batch and draw the same, so all find the same
path, without talking to each other: they run the step's code once without doing any node (a *probe*).

What a probe reads of the batch is the *history* of a path. A micro-batch takes a known path if it has the same kind
(shapes, types, frozen parameters) and the same history. Else shapes are inferred on the paths that are known, by one
forward pass, stage by stage; where the step follows none of them, it is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, signature
from lightning_smddp.pipeline.partition.same_batch import same_everywhere
from lightning_smddp.pipeline.runtime.draws import generator_states
from lightning_smddp.pipeline.runtime.engine import PipelineRuntime
from lightning_smddp.pipeline.runtime.remote import OTHER_COURSE, ReplayError, Shapes
from lightning_smddp.pipeline.runtime.replay import Observers, Replay, patched_units
from lightning_smddp.pipeline.runtime.staged_step import StagedStep, Step, TracedPath
from lightning_smddp.wire.broadcast import broadcast_structure
from lightning_smddp.wire.gather import gather_json

_KEPT = 256  # kinds of micro-batches that are remembered,
_KEPT_OF_A_KIND = 16  # and paths of each
_OFTEN, _SELDOM = 4, 20  # a path that is left more often, and in more than one of so many batches, is none

History: TypeAlias = tuple[str, ...] | None
"""What Python code reads of the batch on a path; None for code that cannot be probed."""


def infer_shapes(
    runtime: PipelineRuntime,
    staged: StagedStep,
    step: Step,
    microbatch: MicroBatch,
    train: bool,
    index: int = 0,
) -> Shapes | None:
    """What values look like for micro-batch ``index`` on the path ``staged``. Collective over the pipeline.

    Each stage runs once, with what the stages before have told: the shapes of their values, and what they send.

    Returns:
        None on every rank if the step takes another path.

    Raises:
        Exception: on every rank, where a stage raises one: its own there, a ``RuntimeError`` elsewhere.
    """
    group = runtime.groups.pipeline
    device = runtime.device
    shapes = Shapes(values={})
    received: list[Tensor] = []
    with preserve_state(runtime.root, device), patched_units(runtime.root, staged.graph.units):
        for stage, rank in enumerate(runtime.rank_of_stage):
            report: Any = None
            failure: Exception | None = None
            if rank == runtime.groups.pipeline_rank:
                replay = staged.replays[stage]
                try:
                    with torch.set_grad_enabled(train):
                        report = _run_stage(replay, step, microbatch, index, received, shapes)
                except Exception as error:  # of the user's code: the others wait for a word
                    failure = error
                    report = {"failed": f"{type(error).__name__}: {error}"}
            # One broadcast for each stage, whatever has happened there: also a stage that failed says so, and nobody is
            # left waiting.
            report = broadcast_structure(report, group, rank, device)
            if "failed" in report:
                raise failure or RuntimeError(f"Stage {stage} failed with {report['failed']}")
            if report["other_path"]:
                return None
            found = Shapes.from_json(report["shapes"])
            shapes.merge(found)
            received = report["sent"]
            if stage < runtime.num_stages - 1:
                _require_gradients(received, staged.stage_cuts.live[stage], shapes, train)
    return shapes


def _run_stage(
    replay: Replay,
    step: Step,
    microbatch: MicroBatch,
    index: int,
    received: Sequence[Tensor],
    shapes: Shapes,
) -> dict[str, Any]:
    """A report for all ranks: the shapes that a stage has found, and what it sends. ``shapes``: of earlier stages."""
    found = Shapes(values={})
    try:
        with step.around(None, index, microbatch, keep=replay.stage.is_last):
            observers = Observers(shapes=found)
            sent, _ = replay.run(lambda: step(microbatch), received, shapes, observers)
    except ReplayError:
        return {"other_path": True}
    finally:
        step.forget()
    return {
        "other_path": False,
        "shapes": found.to_json(),
        "sent": [tensor.detach() for tensor in sent],
    }


def _require_gradients(received: Sequence[Tensor], live: Sequence[int], shapes: Shapes, train: bool) -> None:
    """Received tensors require gradients as they would in training: what is made of them then does so, too.

    ``received`` may be longer than ``live``: behind the values there may be numbers that Python has read.
    """
    for value, tensor in zip(live, received, strict=False):
        tensor.requires_grad_(train and shapes.values[value].requires_grad)


@dataclass
class TraceCache:
    """All known paths of one step.

    Args:
        runtime: of this rank.
        steps: the known ones, at least one.
        retrace: traces the step on a micro-batch that no known path fits. Collective.
        train: whether the step has a backward.
    """

    runtime: PipelineRuntime
    steps: list[StagedStep]
    retrace: Callable[[Any, MicroBatch, int], StagedStep]
    train: bool
    _paths: dict[str, list[tuple[History, TracedPath]]] = field(default_factory=dict)  # by kind of micro-batch
    _now: dict[str, TracedPath] = field(default_factory=dict)  # in this batch, where all micro-batches take the same
    _is_unprobed: bool = False  # the path that was kept last cannot be probed
    _found: int = 0  # batches whose paths were looked for,
    _left: int = 0  # and how often one of them was not what the step did
    _draws_anew: bool = False  # the last probe drew torch's random numbers where the graph knows of none
    _reason: str = ""  # why no known path was the one of a micro-batch
    _parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        """Collect the parameters once: it takes longer than to look at them."""
        self._parameters = list(self.runtime.root.parameters())

    def remember(self, staged: StagedStep, step: Step, microbatch: MicroBatch, index: int = 0) -> TracedPath:
        """``staged`` was traced with a micro-batch like this."""
        path = TracedPath(staged, Shapes.of(staged.graph))
        return self._keep(path, step, microbatch, index)

    def find(self, step: Step, microbatches: Sequence[MicroBatch]) -> list[TracedPath]:
        """The path that ``step`` takes on each micro-batch of a batch. Collective over the pipeline.

        Raises:
            RuntimeError: on every rank, if it takes another path on one alone.
            SplitError: on every rank, if it takes another path each time.
        """
        self._now.clear()
        self._found += 1
        paths: list[TracedPath] = []
        while len(paths) < len(microbatches):
            # All ranks look up what they know, up to the first that they do not; they vote that they have found the
            # same; only then do they do together what takes all of them.
            found = self._find_known(step, microbatches, len(paths))
            self._require_same_paths(found)
            paths += found
            index = len(paths)
            if index < len(microbatches):
                new_path = self._discover(step, microbatches[index], index)
                paths.append(new_path)
        return paths

    def learn(
        self,
        step: Step,
        microbatches: Sequence[MicroBatch],
        paths: Sequence[TracedPath],
        failures: Mapping[int, str],
    ) -> None:
        """Find the path of a micro-batch that left the one that was found for it, behind its last module. Collective.

        Args:
            step: the user's.
            microbatches: of the batch.
            paths: that were found for them.
            failures: by micro-batch, how it left its path.

        Raises:
            SplitError: on every rank: there is none that stages can follow, or it changes too often.
        """
        index = min(failures)
        failure = failures[index]
        microbatch = microbatches[index]
        self._left += 1
        if self._left > _OFTEN and self._left * _SELDOM > self._found:
            raise SplitError(failure)
        # Another known path may be the one, the latest first. Else the step is traced again, which has to show
        # something new: a path that is known already was left, or did not fit.
        path_left = paths[index].staged
        for staged in reversed(self.steps):
            if staged is path_left:
                continue
            if self._infer(staged, step, microbatch, index) is not None:
                return
        staged = self.retrace(step, microbatch, index)
        digest = staged.graph.digest()
        if any(known.graph.digest() == digest for known in self.steps):
            raise SplitError(failure)
        self.steps.append(staged)
        self.remember(staged, step, microbatch, index)

    # ---- paths that are known ----

    def _find_known(self, step: Step, microbatches: Sequence[MicroBatch], begin: int) -> list[TracedPath]:
        """Those of the micro-batches from ``begin`` on, up to the first whose path is not known."""
        found: list[TracedPath] = []
        for index in range(begin, len(microbatches)):
            path = self._look_up(step, microbatches[index], index)
            if path is None:
                break
            found.append(path)
        return found

    def _look_up(self, step: Step, microbatch: MicroBatch, index: int) -> TracedPath | None:
        # Cheap questions first, as this is asked before every step: the kind is a string of shapes, and only paths on
        # which Python reads the batch, or draws, need a run of the user's code.
        kind = self._kind(microbatch)
        if kind in self._now:
            return self._now[kind]
        self._reason = "It has a batch of a new kind."
        for known, path in self._paths.get(kind, []):
            if self._is_unprobed:
                return self._take(kind, path)
            history = self._probe_control_flow(path, step, microbatch, index)
            if history == known:
                return self._take(kind, path)
            if history is not None:
                new = _first_new(history, known or ())
                self._reason = f"It comes to {new}."
        return None

    def _require_same_paths(self, found: Sequence[TracedPath]) -> None:
        """Raise ``RuntimeError`` on every rank if one goes another way: others would wait for it. Collective."""
        group, device = self.runtime.groups.host
        if group.size() == 1:
            return
        # Paths go by their numbers in `steps`, which are the same on all ranks, as these trace together.
        number_of = {id(staged): number for number, staged in enumerate(self.steps)}
        numbers = [number_of[id(path.staged)] for path in found]
        if same_everywhere(numbers, group, device):
            return
        gathered = gather_json([numbers, self._reason], group, device)
        rank, reason = self._difference(gathered)
        raise RuntimeError(
            f"The step takes another course on rank {rank} of the pipeline than on others: {reason} What a step does "
            "may depend on the batch, on random numbers, on the epoch and the step's number, but not on the rank, the "
            "process or the time."
        )

    def _difference(self, gathered: Sequence[tuple[list[int], str]]) -> tuple[int, str]:
        """A rank that takes another path than rank 0, or rank 0 itself, and why.

        Args:
            gathered: of each rank the paths of its micro-batches, up to the first whose path it does not know, and why
                it does not know that one.
        """
        first, first_reason = gathered[0]
        for rank, (numbers, reason) in enumerate(gathered):
            if len(numbers) > len(first):
                return 0, first_reason
            if len(numbers) < len(first):
                return rank, reason
            for here, there in zip(numbers, first, strict=True):
                if here != there:
                    return rank, self.steps[here].graph.difference_from(self.steps[there].graph)
        raise AssertionError("the ranks have found the same paths")

    def _take(self, kind: str, path: TracedPath) -> TracedPath:
        """Other micro-batches of this batch take the same, if nothing that differs between them decides."""
        if not self._varies():
            self._now[kind] = path
        return path

    def _varies(self) -> bool:
        return any(staged.graph.reads_of_batch or staged.graph.draws for staged in self.steps)

    def _kind(self, microbatch: MicroBatch) -> str:
        """What shapes follow from: those of the micro-batch, and which parameters are trained."""
        trained = "".join("01"[parameter.requires_grad] for parameter in self._parameters)
        return f"{signature(microbatch)}|{trained}"

    # ---- new paths ----

    def _discover(self, step: Step, microbatch: MicroBatch, index: int) -> TracedPath:
        """A path that no rank knows for micro-batches like this one. Collective."""
        for staged in self.steps:
            path = self._infer(staged, step, microbatch, index)
            if path is not None:
                return path
        staged = self.retrace(step, microbatch, index)
        self.steps.append(staged)
        return self.remember(staged, step, microbatch, index)

    def _infer(self, staged: StagedStep, step: Step, microbatch: MicroBatch, index: int) -> TracedPath | None:
        """The path of ``staged`` with the shapes of this micro-batch; None if the step does not go there."""
        shapes = infer_shapes(self.runtime, staged, step, microbatch, self.train, index)
        if shapes is None:
            return None
        # Units fit, and so do shapes. Code between them may still draw where it drew nothing as it was traced: then
        # each stage would draw other numbers.
        path = TracedPath(staged, shapes)
        self._probe_control_flow(path, step, microbatch, index)
        if self._draws_anew:
            return None
        return self._keep(path, step, microbatch, index)

    def _keep(self, path: TracedPath, step: Step, microbatch: MicroBatch, index: int) -> TracedPath:
        """Remember ``path`` for micro-batches like this; the oldest is forgotten where there are too many."""
        kind = self._kind(microbatch)
        history = self._probe_control_flow(path, step, microbatch, index)
        if self._varies():
            self._require_probed(history)
        self._is_unprobed = history is None
        while len(self._paths) >= _KEPT and kind not in self._paths:
            oldest = next(iter(self._paths))
            del self._paths[oldest]
        # The path that was found last is asked for first.
        known = self._paths.setdefault(kind, [])
        del known[_KEPT_OF_A_KIND - 1 :]
        known.insert(0, (history, path))
        return self._take(kind, path)

    def _require_probed(self, history: History) -> None:
        """Raise ``SplitError`` on every rank if the path that was just found cannot be found again. Collective."""
        reason_here: str | None = None
        if history is None:
            reason_here = self._reason
        for reason in gather_json(reason_here, self.runtime.groups.pipeline, self.runtime.device):
            if reason is not None:
                raise SplitError(
                    "The step takes another course each time that it is run on the same batch, so that stages cannot "
                    f"agree: {reason} What it does between modules may depend on the batch, not on other random "
                    "numbers."
                )

    # ---- probes ----

    def _probe_control_flow(self, path: TracedPath, step: Step, microbatch: MicroBatch, index: int) -> History:
        """What Python code reads of the batch on this path; None if the step leaves it, or cannot be probed."""
        staged, shapes = path
        self._draws_anew = False
        # Nothing of a probe may stay: torch's random numbers are put back, and the step is told to keep nothing of what
        # its code shows.
        reads: list[str] = []
        observers = Observers(reads=reads)
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.set_grad_enabled(self.train),
                patched_units(self.runtime.root, staged.graph.units),
                step.around(None, index, microbatch, keep=False),
            ):
                before = generator_states(self.runtime.device)
                staged.probe.run(lambda: step(microbatch), (), shapes, observers, microbatch.answers)
                if not staged.graph.shares_draws:
                    after = generator_states(self.runtime.device)
                    self._draws_anew = not _are_equal(before, after)
        except ReplayError as error:
            self._reason, _, _ = str(error).partition(f" {OTHER_COURSE}")
            return None
        if self._draws_anew:
            self._reason = "It draws random numbers where it drew none."
            return None
        return tuple(reads)


def _are_equal(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(state, other) for state, other in zip(states, others, strict=True))


def _first_new(history: Sequence[str], known: Sequence[str]) -> str:
    """The first read in ``history`` that is another one in ``known``."""
    for here, there in zip_longest(history, known, fillvalue="the end"):
        if here != there:
            return here
    return "the end"
