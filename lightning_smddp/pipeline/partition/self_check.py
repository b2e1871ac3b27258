"""Compares numbers: the pipeline's loss and gradients on two micro-batches with those of a plain loop.

Both are run by ``bridge/partitioning.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_smddp.pipeline.capture.graph import Node

EXACT, MIXED = 1e-3, 3e-2  # relative differences that rounding explains, in fp32 and with 16-bit types
# Of the whole gradient's norm: a smaller gradient of a unit is compared as if it were that large. A bias before a
# BatchNorm, say, has no gradient but what rounding leaves, and that is another one each time.
_SMALL = 1e-3


class VerificationError(RuntimeError):
    """The pipeline computes something else than the step on one rank."""


@dataclass(frozen=True)
class Finding:
    """A unit's gradient norm in the whole step and in the pipeline, or the loss (``name`` is ``"loss"``)."""

    name: str
    expected: float
    actual: float
    scale: float

    @property
    def difference(self) -> float:
        """Relative; infinite if one of the two is not finite and the other is."""
        if self.expected == self.actual or (math.isnan(self.expected) and math.isnan(self.actual)):
            return 0.0
        found = abs(self.actual - self.expected) / max(abs(self.expected), _SMALL * self.scale, 1e-30)
        return math.inf if math.isnan(found) else found


def norm_of(gradient: Tensor) -> float:
    """The 2-norm, computed in fp32; rows of a sparse gradient count once each."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return float(gradient.detach().float().norm())


def compare(
    nodes: Iterable[Node],
    expected_loss: float,
    actual_loss: float,
    expected: Mapping[str, float],
    actual: Mapping[str, float],
) -> list[Finding]:
    """The loss, then each unit's gradient norm, in the order of the step; bare parameters by the operation on them."""
    total = math.hypot(*filter(math.isfinite, expected.values()))
    findings = [Finding("loss", expected_loss, actual_loss, abs(expected_loss))]
    remaining = expected.keys() | actual.keys()
    for node in nodes:
        names = remaining.intersection(node.parameters)  # one that several nodes use counts for the first of them
        remaining -= names
        if names:
            norms = [math.hypot(*(of.get(name, 0.0) for name in names)) for of in (expected, actual)]
            findings.append(Finding(node.module or node.name, norms[0], norms[1], total))
    return findings


def require_equal(findings: Sequence[Finding], tolerance: float) -> None:
    """Raise :class:`VerificationError` naming the first unit that differs, from the end of the step backwards."""
    wrong = [finding for finding in findings if finding.difference > tolerance]
    if not wrong:
        return
    loss, last = findings[0], wrong[-1]
    text = f"the loss is {loss.actual:.7g}, in one process {loss.expected:.7g}"
    if last is not loss:
        text += f"; the gradient of {last.name!r} has norm {last.actual:.7g}, in one process {last.expected:.7g}"
    raise VerificationError(
        f"The pipeline does not compute what the step computes on one rank: {text}. Something passes "
        "between modules in a way that cannot be seen: a Python number made from a tensor, an object that is changed, "
        "a global variable, a metric in the loss that does not say `is_differentiable = True`. Return it from the "
        "module as a tensor, keep both ends in one module, or name the modules of each stage by `split=`. "
        "(`PartitionOptions(check=False)` turns this check off, not the error.)"
    )
