"""Whether the weights of micro-batches, found at the first batch, fit a course that the step takes later, too.

A step may join rows of a memory to its batch once it has some, or add a loss between rows after a warm-up. Then it
takes another course on batches of the same shapes, and its loss may be another kind of mean.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.messages import broadcast_json
from lightning_smddp.pipeline.constant_random import ConstantRandom
from lightning_smddp.pipeline.microbatches import MicroBatch
from lightning_smddp.pipeline.variants import Course
from lightning_smddp.pipeline.weight_trials import EXACT, MIXED
from lightning_smddp.strategies.batch_cutting import BatchCutter
from lightning_smddp.strategies.divided_module import DividedModule
from lightning_smddp.strategies.pipeline_step import LightningStep, loss_of


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
    if not divided.take_unforeseen(step) or is_first or not check or not divided.weighting.fits:
        return microbatches, courses
    pair = cutter.pair(batch, microbatches)
    problem = None if pair is None else misfit(divided, step.unscaled(), pair)
    divided.take_unforeseen(step)  # of the trial
    if problem is None:
        return microbatches, courses
    divided.weighting = replace(divided.weighting, fits=False)
    cutter.looks_across_rows = True
    if dist.get_rank() == 0:
        warnings.warn(f"{problem} {cutter.consequence()}", stacklevel=2)
    microbatches = cutter.weighted(divided.weighting, cutter.cut(batch, step, can_try=False))
    return microbatches, divided.courses(step, microbatches)


def misfit(divided: DividedModule, step: LightningStep, pair: MicroBatch) -> str | None:
    """What is wrong with the weights on the rows of ``pair``, forward only; None if they fit. Collective.

    Args:
        divided: the module.
        step: a training step, without a scale.
        pair: about two micro-batches.
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
        return None
    return (
        f"Since {step.place()} the training step does something else than in the first batch: the loss of {pair.size} "
        f"rows is {found[0]:.6g}, but those of its two halves, weighted as at first, make {found[1]:.6g}. So the loss "
        "of a batch is not the mean over its micro-batches any more."
    )


def _loss(divided: DividedModule, step: LightningStep, rows: MicroBatch, seed: int) -> float:
    """Without chance, as far as possible; nan where the step does not end here."""
    with torch.random.fork_rng(devices=[]), ConstantRandom(), torch.no_grad():
        torch.manual_seed(seed)  # so that what stays random shows
        seen = divided.try_out(step, [rows])
    return math.nan if seen is None else float(loss_of(seen.results.output, step.hook, detached=True))
