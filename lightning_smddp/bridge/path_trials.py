"""Whether the weights of micro-batches, found at the first batch, fit a course that the step takes later, too.

A step may join rows of a memory to its batch once it has some, or add a loss between rows after a warm-up. Then it
takes another course on batches of the same shapes, and its loss may be another kind of mean. Or all labels count until
rows are padded: then the first batch does not show whether a part of the loss needs other weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.bridge.batch_cutting import BatchCutter
from lightning_smddp.bridge.partitioned_module import PartFailedError, PartitionedModule
from lightning_smddp.bridge.result_trials import RETURNED, Findings, tolerance_of, try_results
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_results import KeptState, Observed
from lightning_smddp.bridge.step_values import is_loss
from lightning_smddp.bridge.weighing import as_trained
from lightning_smddp.pipeline.capture.constant_random import ConstantRandom
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.capture.python_random import seed_torch
from lightning_smddp.pipeline.partition.gradient_trials import (
    Gradients,
    Misfit,
    misfit_of,
    noted_gradients,
    tolerances_on,
)
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.weight_trials import EXACT, MIXED
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.runtime.staged_step import TracedPath
from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.gather import gather_json

_MOST_TAILS = 16
_FITS = Misfit("", 0.0)
_CHANGING = (
    "What the training step does behind its last module is something else in too many batches, so that nobody knows "
    "whether the weights of micro-batches fit."
)
_LATE = (
    "That was in a batch that counts already, as gradients are accumulated or averaged over replicas. Give `fit` the "
    "last checkpoint as `ckpt_path`: weights are found again then, for the step as it is at that time. If it changes "
    "to and fro, use num_microbatches=1."
)


@dataclass(frozen=True)
class _Problem:
    """Why micro-batches do not make up a batch; ``is_of_loss``, or only of what the step shows."""

    text: str
    is_of_loss: bool = True


def find_courses(
    divided: PartitionedModule, cutter: BatchCutter, step: LightningStep, batch: Any, check: bool, is_first: bool
) -> tuple[list[MicroBatch], list[TracedPath]]:
    """The micro-batches of a batch to train on, and the course of each. Collective over the pipeline.

    Collective over all replicas, too, after numbers of batches that are the same for all.

    Args:
        divided: the module; it, and ``cutter``, learn if the weights of micro-batches fit no more.
        cutter: cuts batches.
        step: a training step.
        batch: the same on all ranks.
        check: whether to look at weights.
        is_first: whether they were found with this batch.
    """
    microbatches = cutter.weighted(divided.weighting, cutter.cut(batch, step, can_try=False))
    courses = divided.courses(step, microbatches)
    since = _since(divided, step, microbatches)
    if is_first or not check:
        return microbatches, courses
    pair = cutter.pair(batch, microbatches)
    problem = _drift(divided, step, pair) if divided.doubts.take_look() else None
    if since is not None and problem is None:
        problem = _problem(divided, step, pair, since)
    divided.take_unforeseen(step)  # of the trials
    if problem is None or not divided.weighting.fits:
        return microbatches, courses
    _give_up(divided, cutter, step, problem)
    microbatches = cutter.weighted(divided.weighting, cutter.cut(batch, step, can_try=False))
    return microbatches, divided.courses(step, microbatches)


def look_behind(
    divided: PartitionedModule,
    cutter: BatchCutter,
    step: LightningStep,
    batch: Any,
    microbatches: Sequence[MicroBatch],
) -> None:
    """Compare weights, if something new has run behind the last module of a batch that counts. Collective.

    Raises:
        RuntimeError: on every rank: they did not fit.
    """
    if not divided.doubts.of_tail:
        return
    with step.capture.aside():
        problem = _problem(divided, step, cutter.pair(batch, microbatches), _else(step))
    divided.take_unforeseen(step)
    if problem is None:
        return
    if problem.is_of_loss and divided.options.num_microbatches is None:
        raise RuntimeError(f"{problem.text} {_LATE}")
    _give_up(divided, cutter, step, problem)


def _since(divided: PartitionedModule, step: LightningStep, microbatches: Sequence[MicroBatch]) -> str | None:
    """Why, and from when on, weights may not fit any more, in words; None if nothing says so."""
    weighs_newly = divided.doubts.of_weights(microbatches)
    if divided.take_unforeseen(step) or divided.doubts.of_tail:
        return _else(step)
    if weighs_newly:
        return f"At {step.place()} what counts in micro-batches is unlike their rows for the first time"
    return None


def _else(step: LightningStep) -> str:
    return f"Since {step.place()} the training step does something else than in the first batch"


def _problem(divided: PartitionedModule, step: LightningStep, pair: MicroBatch | None, since: str) -> _Problem | None:
    """What is wrong on the rows of ``pair``. Collective over the pipeline."""
    divided.doubts.of_tail = False
    if pair is None or not divided.weighting.fits:
        return None
    if divided.doubts.new_tails > _MOST_TAILS:
        return _Problem(_CHANGING)
    text = misfit(divided, step, pair, since)
    if text is not None:
        return _Problem(text)
    text = _unlike(divided, step.unscaled(), pair)
    return None if text is None else _Problem(text, is_of_loss=False)


def _drift(divided: PartitionedModule, step: LightningStep, pair: MicroBatch | None) -> _Problem | None:
    """What is wrong with weights since two batches, for whatever reason. Collective over all ranks.

    Without a reason to look, 16 bits say too little: rounding is worse in gradients of a model that has been trained.
    """
    problem = None
    if pair is not None and divided.weighting.fits and divided.is_exact() and not _draws(step):
        since = f"At {step.place()} the loss is another than when weights of micro-batches were found"
        found = _misfit_of_gradients(divided, step, pair)
        problem = None if found is None else _in_words(found, pair, since)
    if divided.replicas is not None:  # which all go on in the same way
        assert dist.group.WORLD is not None
        problems = gather_json(problem, dist.group.WORLD, divided.device)
        problem = next((text for text in problems if text is not None), None)
    if not divided.doubts.suspect(problem is not None):
        return None
    assert problem is not None
    return _Problem(problem)


def _draws(step: LightningStep) -> bool:
    """Whether ranks share what torch draws: some rows draw the same each time, but their parts do not."""
    return step.random is not None and step.random.sources.with_torch


def _give_up(divided: PartitionedModule, cutter: BatchCutter, step: LightningStep, problem: _Problem) -> None:
    """Batches are whole from here on, unless the user gave the number of micro-batches."""
    if problem.is_of_loss:
        divided.weighting = replace(divided.weighting, fits=False)
        cutter.looks_across_rows = True
    elif divided.options.num_microbatches is None:
        cutter.keep_whole(step)
    if dist.get_rank() == 0:
        warnings.warn(f"{problem.text} {cutter.consequence()}", stacklevel=2)


def misfit(divided: PartitionedModule, step: LightningStep, pair: MicroBatch, since: str) -> str | None:
    """What is wrong with the weights on the rows of ``pair``, forward only; None if they fit. Collective.

    Args:
        divided: the module.
        step: a training step.
        pair: about two micro-batches.
        since: when and why they are looked at, in words.
    """
    parts = pair.split(2)
    if len(parts) < 2:
        return None
    parts = divided.weighting.apply(parts)
    whole, again, *losses = [_loss(divided, step, rows, seed) for seed, rows in enumerate((pair, pair, *parts))]
    if _draws(step):
        return None
    found: Any = None
    if divided.runtime.ends_here:
        predicted = sum(part.weight * loss for part, loss in zip(parts, losses, strict=True) if part.weight)
        scale = max(abs(whole), *(abs(loss) for loss in losses), 1e-8)
        tolerance = EXACT if divided.is_exact() else MIXED
        by_chance = abs(whole - again) > tolerance * scale or not math.isfinite(whole)
        found = None if by_chance or abs(predicted - whole) <= tolerance * scale else [whole, predicted]
    found = broadcast_json(found, divided.groups.pipeline, divided.device, divided.runtime.last_rank)
    if found is None:
        gradients = _misfit_of_gradients(divided, step, pair)
        return None if gradients is None else _in_words(gradients, pair, since)
    return (
        f"{since}: the loss of {pair.size} rows is {found[0]:.6g}, but those of its two halves, weighted as at first, "
        f"make {found[1]:.6g}. So the loss of a batch is not the mean over its micro-batches any more."
    )


def _in_words(gradients: Misfit, pair: MicroBatch, since: str) -> str:
    return (
        f"{since}: for {pair.size} rows the gradient of {gradients.parameter!r} differs by {gradients.error:.2g} "
        "of its size from those of their two halves, weighted as at first. So a part of the loss looks across "
        "rows, or needs other weights."
    )


def _unlike(divided: PartitionedModule, step: LightningStep, pair: MicroBatch) -> str | None:
    """What the step shows now, and parts do not make up; rules for what it shows for the first time. Collective."""
    parts = divided.weighting.apply(pair.split(2))
    if len(parts) < 2 or _draws(step):
        return None
    capture = step.capture

    def run(some: Sequence[MicroBatch], state: KeptState | None) -> Observed | None:
        with torch.random.fork_rng(devices=[]), ConstantRandom(), torch.no_grad():
            return divided.try_out(step, some, state)

    try:
        tolerance, by_rows = tolerance_of(divided.is_exact(), divided.device), divided.weighting.kind == "rows"
        found = try_results(run, lambda _: None, pair, parts, capture, step.key, tolerance, by_rows)
    except PartFailedError:  # on every rank
        found = Findings()
    group, last = divided.groups.pipeline, divided.runtime.last_rank
    found = Findings.from_json(broadcast_json(found.to_json(), group, divided.device, last))
    divided.learned = found = found.beside(divided.learned)
    found.teach(capture, step.key)
    found.differences = {
        place: texts for place, texts in found.differences.items() if not is_loss(place) and place != RETURNED
    }
    was_said = bool(divided.warnings) and divided.options.num_microbatches is not None
    if not found.differences or was_said:
        return None
    return (
        f"Since {step.place()} the training step shows what parts of a batch do not make up: {found.text()}. A "
        "torchmetrics object sees whole batches."
    )


def _misfit_of_gradients(divided: PartitionedModule, step: LightningStep, pair: MicroBatch) -> Misfit | None:
    """How far gradients of parts are from making up the pair's; None if they do, or nothing can be said. Collective.

    What does not fit two parts has to do so with three: rounding at an activation's kink is elsewhere there.
    """
    whole = _gradients(divided, step, pair, 0)
    if whole is None:
        return None
    found = _misfit_of_parts(divided, step, pair, whole, 2, 1.0)
    if found is None or found is _FITS:
        return None
    again = _gradients(divided, step, pair, 1)
    if again is None or _agreed(divided, whole, [again], [1.0], 1.0) is not _FITS:
        return None  # by chance
    confirmed = _misfit_of_parts(divided, step, pair, whole, 3, 0.5)
    return None if confirmed is _FITS else found


def _misfit_of_parts(
    divided: PartitionedModule, step: LightningStep, pair: MicroBatch, whole: Gradients, count: int, strictness: float
) -> Misfit | None:
    """That of ``count`` parts of ``pair``; None if nothing can be said."""
    parts = divided.weighting.apply(pair.split(count))
    if len(parts) < 2:
        return None
    runs = [_gradients(divided, step, part, 0) for part in parts]
    mine = [run for run in runs if run is not None]
    if len(mine) < len(runs):  # on every rank
        return None
    return _agreed(divided, whole, mine, [part.weight for part in parts], strictness)


def _agreed(
    divided: PartitionedModule,
    whole: Gradients,
    parts: Sequence[Gradients],
    weights: Sequence[float],
    strictness: float,
) -> Misfit | None:
    """By how much ``parts`` miss ``whole`` on any rank, if they do; None where they are not finite. Collective."""
    channel = divided.groups.host
    largest = max(gather_json(max([0.0, *whole.norms.values()]), *channel))
    runs = (whole, *parts)
    is_exact = divided.is_exact() and all(run.is_exact for run in runs)  # autocast may keep nothing for backward
    is_finite = all(run.is_finite() for run in runs)
    found = misfit_of(whole, parts, weights, largest)
    everyones = gather_json([found.parameter, found.error, is_exact, is_finite], *channel)
    exact, mixed = tolerances_on(divided.device)
    tolerance = strictness * (exact if all(entry[2] for entry in everyones) else mixed)
    if not all(entry[3] for entry in everyones):
        return None
    name, error = max(((entry[0], entry[1]) for entry in everyones), key=lambda entry: entry[1])
    return Misfit(name, error) if error > tolerance else _FITS


def _gradients(divided: PartitionedModule, step: LightningStep, rows: MicroBatch, seed: int) -> Gradients | None:
    """Of this rank's parameters; None on every rank if the step leaves its course, or fails. Collective."""
    alone, trial = replace(rows, weight=1.0), step.on_trial()  # scaled, as else little is left in 16 bits
    trial.offset = 0
    unaveraged = nullcontext() if divided.replicas is None else divided.replicas.idle()
    with preserve_state(divided.module, divided.device), ConstantRandom(), unaveraged:
        as_trained(divided.module)
        seed_torch(seed)
        with noted_gradients(divided.window.parameters) as found, divided.runtime.engine.unrecorded():
            try:
                divided.runtime.run(divided.courses(trial, [alone]), trial, [alone], True)
            except LeftCourseError:
                return None
            finally:
                trial.forget()
    return found


def _loss(divided: PartitionedModule, step: LightningStep, rows: MicroBatch, seed: int) -> float:
    """Without chance, as far as possible; nan where the step does not end here."""
    with preserve_state(divided.module, divided.device), ConstantRandom(), torch.no_grad():
        as_trained(divided.module)
        seed_torch(seed)  # so that what stays random shows
        seen = divided.try_out(step.unscaled(), [rows])
    return math.nan if seen is None else float(loss_of(seen.results.output, step.hook, detached=True))
