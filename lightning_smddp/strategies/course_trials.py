"""Whether the weights of micro-batches, found at the first batch, fit a course that the step takes later, too.

A step may join rows of a memory to its batch once it has some, or add a loss between rows after a warm-up. Then it
takes another course on batches of the same shapes, and its loss may be another kind of mean. Or all labels count until
rows are padded: then the first batch does not show whether a part of the loss needs other weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.messages import broadcast_json, gather_json
from lightning_smddp.pipeline.constant_random import ConstantRandom
from lightning_smddp.pipeline.departures import LeftCourseError
from lightning_smddp.pipeline.gradient_trials import Gradients, Misfit, misfit_of, noted_gradients, tolerances_on
from lightning_smddp.pipeline.microbatches import MicroBatch
from lightning_smddp.pipeline.untouched import untouched
from lightning_smddp.pipeline.variants import Course
from lightning_smddp.pipeline.weight_trials import EXACT, MIXED
from lightning_smddp.strategies.batch_cutting import BatchCutter
from lightning_smddp.strategies.divided_module import DividedModule, PartFailedError
from lightning_smddp.strategies.kept_state import KeptState
from lightning_smddp.strategies.pipeline_step import LightningStep, loss_of
from lightning_smddp.strategies.result_trials import RETURNED, Findings, tolerance_of, try_results
from lightning_smddp.strategies.step_results import Observed
from lightning_smddp.strategies.step_values import is_loss

_MOST_TAILS = 16
_CHANGING = (
    "What the training step does behind its last module is something else in too many batches, so that nobody knows "
    "whether the weights of micro-batches fit."
)
_LATE = (
    "That was in a batch that counts already, as gradients are accumulated or averaged over replicas. Give `fit` the "
    "last checkpoint as `ckpt_path`: weights are found again then, for the step as it is at that time. If it changes "
    "to and fro, use num_microbatches=1."
)


def find_courses(
    divided: DividedModule, cutter: BatchCutter, step: LightningStep, batch: Any, check: bool, is_first: bool
) -> tuple[list[MicroBatch], list[Course]]:
    """The micro-batches of a batch to train on, and the course of each. Collective over the pipeline.

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
    weighs_newly = divided.doubts.of_weights(microbatches)
    does_something_else = divided.take_unforeseen(step) or divided.doubts.of_tail
    if is_first or not check or not divided.weighting.fits or not (weighs_newly or does_something_else):
        return microbatches, courses
    since = f"At {step.place()} what counts in micro-batches is unlike their rows for the first time"
    if does_something_else:
        since = f"Since {step.place()} the training step does something else than in the first batch"
    counts = divided.doubts.in_a_batch_that_counts
    divided.doubts.in_a_batch_that_counts = False
    pair = cutter.pair(batch, microbatches)
    problem = None
    if pair is not None:
        problem = _CHANGING if divided.doubts.new_tails > _MOST_TAILS else misfit(divided, step.unscaled(), pair, since)
    divided.doubts.of_tail = False
    if problem is not None:
        if counts and divided.options.num_microbatches is None:
            raise RuntimeError(f"{problem} {_LATE}")
        divided.weighting = replace(divided.weighting, fits=False)
        cutter.looks_across_rows = True
    elif pair is None or (problem := _unlike(divided, step.unscaled(), pair)) is None:
        divided.take_unforeseen(step)
        return microbatches, courses
    elif divided.options.num_microbatches is None:
        cutter.keep_whole(step)
    if dist.get_rank() == 0:
        warnings.warn(f"{problem} {cutter.consequence()}", stacklevel=2)
    divided.take_unforeseen(step)  # of the trials
    microbatches = cutter.weighted(divided.weighting, cutter.cut(batch, step, can_try=False))
    return microbatches, divided.courses(step, microbatches)


def misfit(divided: DividedModule, step: LightningStep, pair: MicroBatch, since: str) -> str | None:
    """What is wrong with the weights on the rows of ``pair``, forward only; None if they fit. Collective.

    Args:
        divided: the module.
        step: a training step, without a scale.
        pair: about two micro-batches.
        since: when and why they are looked at, in words.
    """
    parts = pair.split(2)
    if len(parts) < 2:
        return None
    parts = divided.weighting.apply(parts)
    whole, again, *losses = [_loss(divided, step, rows, seed) for seed, rows in enumerate((pair, pair, *parts))]
    if step.random is not None and step.random.sources.with_torch:
        return None  # the pair draws the same each time, but its parts do not
    found: Any = None
    if divided.runtime.ends_here:
        predicted = sum(part.weight * loss for part, loss in zip(parts, losses, strict=True) if part.weight)
        scale = max(abs(whole), *(abs(loss) for loss in losses), 1e-8)
        tolerance = EXACT if divided.is_exact() else MIXED
        by_chance = abs(whole - again) > tolerance * scale or not math.isfinite(whole)
        found = None if by_chance or abs(predicted - whole) <= tolerance * scale else [whole, predicted]
    found = broadcast_json(found, divided.groups.pipeline, divided.device, divided.runtime.last_rank)
    if found is None:
        gradients = None if divided.replicas is not None else _misfit_of_gradients(divided, step, pair, parts)
        if gradients is None:
            return None
        return (
            f"{since}: for {pair.size} rows the gradient of {gradients.parameter!r} differs by {gradients.error:.2g} "
            "of its size from those of their two halves, weighted as at first. So a part of the loss looks across "
            "rows, or needs other weights."
        )
    return (
        f"{since}: the loss of {pair.size} rows is {found[0]:.6g}, but those of its two halves, weighted as at first, "
        f"make {found[1]:.6g}. So the loss of a batch is not the mean over its micro-batches any more."
    )


def _unlike(divided: DividedModule, step: LightningStep, pair: MicroBatch) -> str | None:
    """What the step shows now, and parts do not make up; rules for what it shows for the first time. Collective."""
    parts = divided.weighting.apply(pair.split(2))
    if len(parts) < 2 or (step.random is not None and step.random.sources.with_torch):
        return None
    capture, known = step.capture, dict(step.capture.rules)

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
    replace(found, rules={**found.rules, **known}).teach(capture, step.key)
    found.differences = {
        place: texts for place, texts in found.differences.items() if not is_loss(place) and place != RETURNED
    }
    if not found.differences or divided.warnings:  # or it was said at the start
        return None
    return (
        f"Since {step.place()} the training step shows what parts of a batch do not make up: {found.text()}. A "
        "torchmetrics object sees whole batches."
    )


def _misfit_of_gradients(
    divided: DividedModule, step: LightningStep, pair: MicroBatch, parts: Sequence[MicroBatch]
) -> Misfit | None:
    """How far gradients of parts are from making up the pair's; None if they do, or nothing can be said. Collective."""
    runs = [_gradients(divided, step, rows, seed) for seed, rows in enumerate((pair, pair, *parts))]
    mine = [run for run in runs if run is not None]
    if len(mine) < len(runs):  # on every rank
        return None
    largest = max(gather_json(max([0.0, *mine[0].norms.values()]), *divided.groups.host))
    exact, mixed = tolerances_on(divided.device)
    is_exact, is_finite = all(run.is_exact for run in mine), all(run.is_finite() for run in mine)
    chance = misfit_of(mine[0], [mine[1]], [1.0], largest)
    found = misfit_of(mine[0], mine[2:], [part.weight for part in parts], largest)
    everyones = gather_json([found.parameter, found.error, chance.error, is_exact, is_finite], *divided.groups.host)
    tolerance = exact if all(entry[3] for entry in everyones) else mixed
    if not all(entry[4] and entry[2] <= tolerance for entry in everyones):
        return None
    name, error = max(((entry[0], entry[1]) for entry in everyones), key=lambda entry: entry[1])
    return Misfit(name, error) if error > tolerance else None


def _gradients(divided: DividedModule, step: LightningStep, rows: MicroBatch, seed: int) -> Gradients | None:
    """Of this rank's parameters; None on every rank if the step leaves its course. Collective."""
    alone, trial = replace(rows, weight=1.0), step.unscaled()
    with untouched(divided.module, divided.device), ConstantRandom():
        torch.manual_seed(seed)
        with noted_gradients(divided.window.parameters) as found, divided.runtime.engine.unrecorded():
            try:
                divided.runtime.run(divided.courses(trial, [alone]), trial, [alone], True)
            except LeftCourseError:
                return None
            finally:
                trial.forget()
    return found


def _loss(divided: DividedModule, step: LightningStep, rows: MicroBatch, seed: int) -> float:
    """Without chance, as far as possible; nan where the step does not end here."""
    with torch.random.fork_rng(devices=[]), ConstantRandom(), torch.no_grad():
        torch.manual_seed(seed)  # so that what stays random shows
        seen = divided.try_out(step, [rows])
    return math.nan if seen is None else float(loss_of(seen.results.output, step.hook, detached=True))
