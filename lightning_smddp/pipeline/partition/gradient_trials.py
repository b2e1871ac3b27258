"""Whether the gradients of parts of some rows make up those of the rows: what the loss alone is too coarse for.

A loss may have a small part that needs other weights than the rest: a penalty on activations beside a mean over labels,
a balance of experts, a term between rows. In the loss of a fresh model it disappears, as it is much the same for all
rows; in the gradient of some parameter it does not. Of each parameter's gradient two numbers are kept, sums with fixed
angles as weights: they add up as gradients do, and no gradient has to be kept.
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_smddp.pipeline.partition.loss_weights import Weighting
from lightning_smddp.pipeline.partition.microbatches import MicroBatch

EXACT, MIXED = 5e-5, 5e-2  # what rounding explains, in fp32 and with 16-bit types, of a gradient's norm
NOISE = 1 / 20  # of the tolerance: errors below it do not tell candidates apart
_CLEAR = 10.0  # times the error of the best candidate is clearly worse
_SMALL = 1e-2  # of the largest norm: smaller gradients are compared as if they were that large
_FEWEST = 4  # rows: with less, another order has halves of the same rows
_CHUNK = 1 << 18  # elements that one set of angles is for
_TURN = 0.7  # the angle between chunks, in radians


@dataclass
class Gradients:
    """Of one run.

    Attributes:
        sums: by parameter.
        norms: by parameter.
        is_exact: nothing that was kept for backward has less than 32 bits.
    """

    sums: dict[str, complex] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    is_exact: bool = True

    def largest_norm(self) -> float:
        """Of any parameter's gradient."""
        return max(self.norms.values(), default=0.0)

    def is_finite(self) -> bool:
        """Whether no norm is NaN or infinite, so that they can be compared."""
        return all(map(math.isfinite, self.norms.values()))


Run: TypeAlias = Callable[[MicroBatch, int], Gradients]
"""(rows, seed): a run of the step without effects; what is still random follows from the seed."""


@contextmanager
def noted_gradients(parameters: Mapping[str, Tensor]) -> Iterator[Gradients]:
    """Within it, a backward pass leaves sums instead of gradients."""
    # The hook takes each gradient away as soon as it is there, so they are never there all at once. What autograd keeps
    # for the backward says whether a part of the forward ran in 16 bits.
    found = Gradients()
    handles = []
    for name, parameter in parameters.items():
        if parameter.requires_grad and not parameter.is_meta:
            note = functools.partial(_note, found, name)
            handles.append(parameter.register_post_accumulate_grad_hook(note))

    def look(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            found.is_exact = False
        return tensor

    try:
        with saved_tensors_hooks(look, lambda tensor: tensor):
            yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _note(found: Gradients, name: str, parameter: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    parameter.grad = None
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    # Sums of cos(i) g[i] and sin(i) g[i] over each chunk, and its norm. All chunks have the same angles, turned by
    # another one each, so that what two of them exchange shows. One copy to the host at the end.
    angles = _angles(gradient.device)  # (2, _CHUNK)
    numbers = []
    for chunk in gradient.reshape(-1).float().split(_CHUNK):
        sums = angles[:, : len(chunk)] @ chunk
        norm = chunk.norm()
        numbers.append(torch.cat([sums, norm[None]]))
    total = 0j
    squares = 0.0
    for index, (cosine, sine, norm) in enumerate(torch.stack(numbers).tolist()):
        total += complex(cosine, sine) * cmath.rect(1.0, _TURN * index)
        squares += norm**2
    found.sums[name] = found.sums.get(name, 0j) + total  # gradients may come in pieces
    found.norms[name] = found.norms.get(name, 0.0) + math.sqrt(squares)


@functools.cache
def _angles(device: torch.device) -> Tensor:
    index = torch.arange(_CHUNK, dtype=torch.float64)  # in 32 bits large angles would be rounded
    angles = torch.stack([index.cos(), index.sin()])
    return angles.float().to(device)


@dataclass(frozen=True)
class Misfit:
    """Of the parameter whose gradients fit least, by how much of its norm."""

    parameter: str
    error: float


def tolerances_on(device: torch.device) -> tuple[float, float]:
    """In fp32, which convolutions on GPUs round to TF32, and with 16-bit types."""
    if device.type == "cpu":
        return EXACT, MIXED
    return 20 * EXACT, MIXED


def error_limit(best: float, tolerance: float) -> float:
    """Up to which error a candidate is kept, where the best one has an error of ``best``."""
    clearly_worse = _CLEAR * best
    return min(tolerance, max(clearly_worse, NOISE * tolerance))


def misfit_of(
    whole: Gradients,
    parts: Sequence[Gradients],
    weights: Sequence[float],
    largest: float | None = None,
) -> Misfit:
    """The largest difference between the gradients of rows and the weighted ones of their parts; 0 without any.

    Args:
        whole: of all rows.
        parts: of their parts.
        weights: of ``parts``.
        largest: norm of any parameter's gradient, where some are on other ranks.
    """
    # A part that counts nothing may have gradients that are not finite: it is left out, not multiplied by zero.
    counted = []
    runs = [whole]
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            counted.append((part, weight))
            runs.append(part)
    if largest is None:
        largest = max(run.largest_norm() for run in runs)
    least = max(_SMALL * largest, 1e-30)
    names: dict[str, None] = {}  # in order
    for run in runs:
        names.update(dict.fromkeys(run.sums))
    worst = Misfit("", 0.0)
    for name in names:
        made = 0j
        size = max(least, whole.norms.get(name, 0.0))
        for part, weight in counted:
            made += weight * part.sums.get(name, 0j)
            size = max(size, weight * part.norms.get(name, 0.0))
        error = abs(made - whole.sums.get(name, 0j)) / size
        if not error <= worst.error:  # also where it is not a number
            worst = Misfit(name, error)
    return worst


Verdict: TypeAlias = "list[Weighting] | Misfit"


@dataclass
class GradientTrial:
    """Compares gradients, on rows that count differently.

    Attributes:
        run: gradients of some rows.
        rows: at least two.
        may_reorder: whether ``rows`` can be put in another order.
        tolerances: in fp32, and with 16-bit types.
    """

    run: Run
    rows: MicroBatch
    may_reorder: bool = True
    tolerances: tuple[float, float] = (EXACT, MIXED)

    def fitting(self, candidates: Sequence[Weighting], conceivable: Sequence[Weighting] = ()) -> Verdict | None:
        """Those of ``candidates`` that gradients fit, or by how much they miss the best one.

        None where nothing can be said: gradients are not finite, or others each time.

        Args:
            candidates: at least one.
            conceivable: others, by which rows may count differently for a part of the loss.
        """
        rows = self.rows
        order = self._order([*candidates, *conceivable])
        if order is not None:
            rows = rows.with_rows_in(order)
        found = self._attempt(rows, candidates, count=2, strictness=1.0)
        if not isinstance(found, Misfit):
            return found
        # A misfit has to be none of chance: the same rows twice, with other seeds, must not differ as much; and it has
        # to show with three parts, too, at half the tolerance: rounding at an activation's kink is elsewhere there.
        first = self.run(rows, 0)
        again = self.run(rows, 1)
        by_chance = misfit_of(first, [again], [1.0])
        if by_chance.error > self._tolerance([first, again]):
            return None
        confirmed = self._attempt(rows, candidates, count=3, strictness=0.5)
        if confirmed is None:
            return found
        return confirmed

    def _attempt(
        self,
        rows: MicroBatch,
        candidates: Sequence[Weighting],
        count: int,
        strictness: float,
    ) -> Verdict | None:
        """The verdict by ``count`` parts of ``rows``, at a share of the tolerance: ``strictness``."""
        parts = rows.split(count)
        if len(parts) < 2:
            return None
        whole = self.run(rows, 0)
        runs = [self.run(part, 0) for part in parts]
        known: dict[tuple[float, ...], Misfit] = {}  # by weights, as several candidates may mean the same ones
        misfits = []
        for candidate in candidates:
            weights = tuple(part.weight for part in candidate.apply(parts))
            counted = [run for run, weight in zip(runs, weights, strict=True) if weight]
            if not all(run.is_finite() for run in (whole, *counted)):
                return None
            if weights not in known:
                known[weights] = misfit_of(whole, runs, weights)
            misfits.append(known[weights])
        best = min(misfits, key=lambda misfit: misfit.error)
        tolerance = strictness * self._tolerance([whole, *runs])
        if best.error > tolerance:
            return best
        limit = error_limit(best.error, tolerance)
        fitting = []
        for candidate, misfit in zip(candidates, misfits, strict=True):
            if misfit.error <= limit:
                fitting.append(candidate)
        return fitting

    def _tolerance(self, runs: Sequence[Gradients]) -> float:
        exact, mixed = self.tolerances
        if all(run.is_exact for run in runs):
            return exact
        return mixed

    def _order(self, candidates: Sequence[Weighting]) -> list[int] | None:
        """Rows that count less come first, so that halves count differently; None if rows have to stay in place."""
        if not self.may_reorder or self.rows.size < _FEWEST:
            return None
        # By the first candidate that counts rows differently; without one they stay as they are.
        order = list(range(self.rows.size))
        rows = self.rows.split(len(order))
        if len(rows) < len(order):
            return None
        for candidate in candidates:
            if candidate.kind not in ("labels", "entries"):
                continue
            counts = [candidate.count(row.value) for row in rows]
            numbers = [float(count) for count in counts if count is not None]
            counts_all_rows = len(numbers) == len(order)
            if counts_all_rows and min(numbers) < max(numbers):
                return sorted(order, key=numbers.__getitem__)
        return order
