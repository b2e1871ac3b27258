"""Trials before and behind a batch that is trained on: do weights still fit?

*Weights* are the factors with which losses of micro-batches are summed to that of the batch. They belong to the *path*,
the sequence of modules and operations that the step takes on a batch.

They are found at the first batch. Later a step may join rows of a memory to its batch once it has some, or add a loss
between rows after a warm-up. Then it takes another path on batches of the same shapes, and its loss may be another kind
of mean. Or all labels count until rows are padded: then the first batch does not show whether a part of the loss needs
other weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_smddp.bridge.batch_cutting import BatchCutter
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.result_trials import PartFailedError
from lightning_smddp.bridge.run_setup import warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.weighing import as_trained
from lightning_smddp.pipeline.capture.constant_random import without_chance
from lightning_smddp.pipeline.capture.own_seeds import seed_torch
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.gradient_trials import (
    Gradients,
    Misfit,
    misfit_of,
    noted_gradients,
    tolerances_on,
)
from lightning_smddp.pipeline.partition.loss_weights import Weighting
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.weight_trials import EXACT, MIXED
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.runtime.staged_step import TracedPath
from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.gather import gather_json

_MOST_TAILS = 16  # batches in which something new may run behind the last module, see `_CHANGING`
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


class PathTrials:
    """The paths that a training step takes on a batch, and whether weights fit them. All is collective.

    Over the pipeline; over all replicas, too, after numbers of batches that are the same for all.

    Args:
        partitioned: the module; it, and ``cutter``, learn if the weights of micro-batches fit no more.
        cutter: cuts batches.
        step: a training step.
        batch: the same on all ranks of the pipeline.
    """

    def __init__(self, partitioned: PartitionedModule, cutter: BatchCutter, step: LightningStep, batch: Any) -> None:
        self.partitioned = partitioned
        self.cutter = cutter
        self.step = step
        self.batch = batch
        self.setup = partitioned.setup
        self.doubts = partitioned.doubts

    @property
    def weighting(self) -> Weighting:
        """How losses of micro-batches make up a batch's, as far as that is known."""
        return self.partitioned.weighed.weighting

    def find(self, is_first: bool) -> tuple[list[MicroBatch], list[TracedPath]]:
        """The micro-batches to train on, and the path of each.

        Args:
            is_first: whether weights were found with this batch.
        """
        microbatches, paths = self._cut_and_find()
        since = self._since(microbatches)
        if is_first or not self.setup.options.partition.check:
            return microbatches, paths
        pair = self.cutter.pair(self.batch, microbatches)
        problem = None
        if self.doubts.take_look():
            problem = self._drift(pair)
        if since is not None and problem is None:
            problem = self._find_problem(pair, since)
        self.partitioned.take_unforeseen(self.step)  # of the trials
        if problem is None or not self.weighting.fits:
            return microbatches, paths
        self._give_up(problem)
        return self._cut_and_find()

    def look_behind(self, microbatches: Sequence[MicroBatch]) -> None:
        """Compare weights, if something new has run behind the last module of a batch that counts.

        Raises:
            RuntimeError: on every rank: they did not fit.
        """
        if not self.doubts.of_tail:
            return
        with self.step.capture.aside():
            pair = self.cutter.pair(self.batch, microbatches)
            problem = self._find_problem(pair, self._since_now())
        self.partitioned.take_unforeseen(self.step)
        if problem is None:
            return
        if problem.is_of_loss and self.setup.options.num_microbatches is None:
            raise RuntimeError(f"{problem.text} {_LATE}")
        self._give_up(problem)

    def _cut_and_find(self) -> tuple[list[MicroBatch], list[TracedPath]]:
        parts = self.cutter.cut(self.batch, self.step, can_try=False)
        microbatches = self.cutter.weighted(self.weighting, parts)
        return microbatches, self.partitioned.paths(self.step, microbatches)

    # ---- reasons to look ----

    def _since(self, microbatches: Sequence[MicroBatch]) -> str | None:
        """Why, and from when on, weights may not fit any more, in words; None if nothing says so."""
        weighs_newly = self.doubts.of_weights(microbatches)
        if self.partitioned.take_unforeseen(self.step) or self.doubts.of_tail:
            return self._since_now()
        if weighs_newly:
            return f"At {self.step.batch_name()} what counts in micro-batches is unlike their rows for the first time"
        return None

    def _since_now(self) -> str:
        return f"Since {self.step.batch_name()} the training step does something else than in the first batch"

    def _find_problem(self, pair: MicroBatch | None, since: str) -> _Problem | None:
        """What is wrong on the rows of ``pair``."""
        self.doubts.of_tail = False
        if pair is None or not self.weighting.fits:
            return None
        if self.doubts.new_tails > _MOST_TAILS:
            return _Problem(_CHANGING)
        text = self._misfit(pair, since)
        if text is not None:
            return _Problem(text)
        text = self._unlike(pair)
        if text is not None:
            return _Problem(text, is_of_loss=False)
        return None

    def _drift(self, pair: MicroBatch | None) -> _Problem | None:
        """What is wrong with weights since two batches, for whatever reason. Collective over all ranks.

        Without a reason to look, 16 bits say too little: rounding is worse in gradients of a model that has been
        trained.
        """
        problem = self._drift_here(pair)
        if self.partitioned.replicas is not None:  # which all go on in the same way
            gathered = gather_json(problem, self.setup.world, self.setup.device)
            problems = [text for text in gathered if text is not None]
            problem = None
            if problems:
                problem = problems[0]
        if not self.doubts.suspect(problem is not None):
            return None
        assert problem is not None
        return _Problem(problem)

    def _drift_here(self, pair: MicroBatch | None) -> str | None:
        """What this pipeline says of it."""
        if pair is None or not self.weighting.fits or not self.partitioned.plan.is_exact:
            return None
        if _draws(self.step):
            return None
        found = self._misfit_of_gradients(pair)
        if found is None:
            return None
        since = f"At {self.step.batch_name()} the loss is another than when weights of micro-batches were found"
        return _in_words(found, pair, since)

    def _give_up(self, problem: _Problem) -> None:
        """Batches are whole from here on, unless the user gave the number of micro-batches."""
        weighed = self.partitioned.weighed
        if problem.is_of_loss:
            weighed.weighting = replace(weighed.weighting, fits=False)
            self.cutter.looks_across_rows = True
        elif self.setup.options.num_microbatches is None:
            self.cutter.keep_whole(self.step)
        warn_on_first_rank(f"{problem.text} {self.cutter.consequence()}")

    # ---- trials ----

    def _misfit(self, pair: MicroBatch, since: str) -> str | None:
        """What is wrong with the weights on the rows of ``pair``, forward first; None if they fit.

        Args:
            pair: about two micro-batches.
            since: when and why they are looked at, in words.
        """
        parts = pair.split(2)
        if len(parts) < 2:
            return None
        parts = self.weighting.apply(parts)
        # Twice, with different seeds: if the same rows have two losses, what is random in the step cannot be made
        # constant, and a difference between whole and parts shows nothing.
        whole = self._loss(pair, 0)
        again = self._loss(pair, 1)
        losses = [self._loss(part, seed) for seed, part in enumerate(parts, start=2)]
        if _draws(self.step):
            return None
        found: Any = None
        if self.partitioned.runtime.ends_here:
            weights = [part.weight for part in parts]
            found = self._misfit_of_losses(whole, again, losses, weights)
        found = broadcast_json(found, self.setup.groups.pipeline, self.setup.device, self.setup.last_rank)
        if found is not None:
            whole, predicted = found
            return (
                f"{since}: the loss of {pair.size} rows is {whole:.6g}, but those of its two halves, weighted as at "
                f"first, make {predicted:.6g}. So the loss of a batch is not the mean over its micro-batches any more."
            )
        misfit = self._misfit_of_gradients(pair)
        if misfit is None:
            return None
        return _in_words(misfit, pair, since)

    def _misfit_of_losses(
        self,
        whole: float,
        again: float,
        losses: Sequence[float],
        weights: Sequence[float],
    ) -> list[float] | None:
        """The loss of all rows, and what ``losses`` of parts make of it, if that is another; None if it is not.

        None also where the rows have another loss ``again``: that is chance.
        """
        predicted = 0.0
        for loss, weight in zip(losses, weights, strict=True):
            if weight:  # a part whose labels are all ignored has nan for its loss, and nan * 0 is nan
                predicted += weight * loss
        tolerance = MIXED
        if self.partitioned.plan.is_exact:
            tolerance = EXACT
        tolerance *= max(abs(whole), *map(abs, losses), 1e-8)
        by_chance = abs(whole - again) > tolerance or not math.isfinite(whole)
        if by_chance or abs(predicted - whole) <= tolerance:
            return None
        return [whole, predicted]

    def _unlike(self, pair: MicroBatch) -> str | None:
        """What the step shows now, and parts do not make up; rules for what it shows for the first time."""
        weighed = self.partitioned.weighed
        if _draws(self.step):
            return None
        try:
            found = self.partitioned.try_on_parts(self.step.unscaled(), pair, weighed.findings)
        except PartFailedError:  # on every rank
            return None
        if found is None:
            return None
        weighed.findings = found
        found.forget_losses()
        was_said = bool(weighed.warnings) and self.setup.options.num_microbatches is not None
        if not found.differences or was_said:
            return None
        return (
            f"Since {self.step.batch_name()} the training step shows what parts of a batch do not make up: "
            f"{found.text()}. A torchmetrics object sees whole batches."
        )

    def _misfit_of_gradients(self, pair: MicroBatch) -> Misfit | None:
        """How far gradients of parts are from making up the pair's; None if they do, or nothing can be said.

        What does not fit two parts has to do so with three: rounding at an activation's kink is elsewhere there.
        """
        # whole == sum of weighted halves    it fits
        # else whole == whole once more      else it is chance
        # else whole == weighted thirds      rounding, as at the kink of an activation; else a misfit
        whole = self._gradients(pair, 0)
        if whole is None:
            return None
        found = self._misfit_of_parts(pair, whole, 2, 1.0)
        if found is None or found is _FITS:
            return None
        again = self._gradients(pair, 1)
        if again is None or self._agreed(whole, [again], [1.0], 1.0) is not _FITS:
            return None  # by chance
        confirmed = self._misfit_of_parts(pair, whole, 3, 0.5)
        if confirmed is _FITS:
            return None
        return found

    def _misfit_of_parts(self, pair: MicroBatch, whole: Gradients, count: int, strictness: float) -> Misfit | None:
        """That of ``count`` parts of ``pair``; None if nothing can be said."""
        parts = self.weighting.apply(pair.split(count))
        if len(parts) < 2:
            return None
        runs = [self._gradients(part, 0) for part in parts]
        made = [run for run in runs if run is not None]
        if len(made) < len(runs):  # on every rank
            return None
        weights = [part.weight for part in parts]
        return self._agreed(whole, made, weights, strictness)

    def _agreed(
        self,
        whole: Gradients,
        parts: Sequence[Gradients],
        weights: Sequence[float],
        strictness: float,
    ) -> Misfit | None:
        """By how much ``parts`` miss ``whole`` on any rank, if they do; None where they are not finite."""
        channel = self.setup.groups.host
        # Each rank has the gradients of its own stages. They are judged on one scale, that of the largest anywhere, and
        # by the worst of all: so every rank comes to the same verdict.
        largest_here = max([0.0, *whole.norms.values()])
        largest = max(gather_json(largest_here, *channel))
        runs = (whole, *parts)
        # Autocast may keep nothing for backward: then gradients are in 16 bits though all values of the step are not.
        exact = self.partitioned.plan.is_exact and all(run.is_exact for run in runs)
        is_finite = all(run.is_finite() for run in runs)
        local = misfit_of(whole, parts, weights, largest)
        gathered = gather_json([local.parameter, local.error, exact, is_finite], *channel)
        names, errors, are_exact, are_finite = zip(*gathered, strict=True)
        if not all(are_finite):
            return None
        tolerance, tolerance_mixed = tolerances_on(self.setup.device)
        if not all(are_exact):
            tolerance = tolerance_mixed
        error = max(errors)
        if error > strictness * tolerance:
            return Misfit(names[errors.index(error)], error)
        return _FITS

    def _gradients(self, rows: MicroBatch, seed: int) -> Gradients | None:
        """Of this rank's parameters; None on every rank if the step leaves its path, or fails."""
        partitioned, module = self.partitioned, self.setup.module
        alone = replace(rows, weight=1.0)
        trial = self.step.on_trial()  # scaled, as else little is left in 16 bits
        trial.offset = 0
        unaveraged: AbstractContextManager[None] = nullcontext()
        if partitioned.replicas is not None:
            unaveraged = partitioned.replicas.idle()
        with preserve_state(module, self.setup.device), without_chance(self.setup.device), unaveraged:
            as_trained(module)
            seed_torch(seed)
            with noted_gradients(partitioned.stash.parameters) as found, partitioned.runtime.engine.unrecorded():
                try:
                    paths = partitioned.paths(trial, [alone])
                    partitioned.runtime.run(paths, trial, [alone], True)
                except LeftCourseError:
                    return None
                finally:
                    trial.forget()
        return found

    def _loss(self, rows: MicroBatch, seed: int) -> float:
        """Without chance, as far as possible; nan where the step does not end here."""
        module = self.setup.module
        with preserve_state(module, self.setup.device), without_chance(self.setup.device), torch.no_grad():
            as_trained(module)
            seed_torch(seed)  # so that what stays random shows
            seen = self.partitioned.try_out(self.step.unscaled(), [rows])
        if seen is None:
            return math.nan
        return float(loss_of(seen.results.output, self.step.hook, detached=True))


def _draws(step: LightningStep) -> bool:
    """Whether ranks share what torch draws: some rows draw the same each time, but their parts do not."""
    return step.random is not None and step.random.sources.with_torch


def _in_words(gradients: Misfit, pair: MicroBatch, since: str) -> str:
    return (
        f"{since}: for {pair.size} rows the gradient of {gradients.parameter!r} differs by {gradients.error:.2g} "
        "of its size from those of their two halves, weighted as at first. So a part of the loss looks across "
        "rows, or needs other weights."
    )
