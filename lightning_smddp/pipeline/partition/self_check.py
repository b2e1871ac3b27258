"""Compares numbers: the pipeline's loss and gradients on two micro-batches with those of a plain loop.

Both are run by ``bridge/partitioning.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

from torch import Tensor

from lightning_smddp.pipeline.capture.graph import Node

Numbers: TypeAlias = tuple[float, dict[str, float]]
"""What is compared: the weighted sum of the losses, and norms of gradients by parameter."""

EXACT, MIXED = 1e-3, 3e-2  # relative differences that rounding explains, in fp32 and with 16-bit types
# Of the whole gradient's norm: a smaller gradient of a unit is compared as if it were that large. A bias before a
# BatchNorm, say, has no gradient but what rounding leaves, and that is another one each time.
_SMALL = 1e-3


class VerificationError(RuntimeError):
    """The pipeline computes something else than the step on one rank."""


def norm_of(gradient: Tensor) -> float:
    """The 2-norm, computed in fp32; rows of a sparse gradient count once each."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return float(gradient.detach().float().norm())


def require_equal(nodes: Iterable[Node], expected: Numbers, actual: Numbers, tolerance: float) -> None:
    """Raise :class:`VerificationError` if numbers differ, with the last unit of the step whose gradient does.

    A parameter outside of units counts with the operation on it.
    """
    (expected_loss, expected_norms), (actual_loss, actual_norms) = expected, actual
    differs = _difference(expected_loss, actual_loss, abs(expected_loss)) > tolerance
    text = f"the loss is {actual_loss:.7g}, in one process {expected_loss:.7g}"
    found = ""
    total = math.hypot(*filter(math.isfinite, expected_norms.values()))
    remaining = expected_norms.keys() | actual_norms.keys()
    for node in nodes:
        names = remaining.intersection(node.parameters)  # one that several nodes use counts for the first of them
        remaining -= names
        one, other = (math.hypot(*(norms.get(name, 0.0) for name in names)) for norms in (expected_norms, actual_norms))
        if _difference(one, other, total) > tolerance:
            found = f"; the gradient of {node.module or node.name!r} has norm {other:.7g}, in one process {one:.7g}"
    if not (differs or found):
        return
    raise VerificationError(
        f"The pipeline does not compute what the step computes on one rank: {text}{found}. Something passes "
        "between modules in a way that cannot be seen: a Python number made from a tensor, an object that is changed, "
        "a global variable, a metric in the loss that does not say `is_differentiable = True`. Return it from the "
        "module as a tensor, keep both ends in one module, or name the modules of each stage by `split=`. "
        "(`PartitionOptions(check=False)` turns this check off, not the error.)"
    )


def _difference(expected: float, actual: float, scale: float) -> float:
    """Relative; infinite if one of the two is not finite and the other is."""
    if expected == actual or (math.isnan(expected) and math.isnan(actual)):
        return 0.0
    found = abs(actual - expected) / max(abs(expected), _SMALL * scale, 1e-30)
    return math.inf if math.isnan(found) else found
