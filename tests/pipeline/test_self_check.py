"""What the comparison before training takes for a difference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_smddp.pipeline.partition.self_check import EXACT, VerificationError, require_equal


def compare(expected: float, actual: float) -> None:
    """Of a bias whose gradient is small beside the whole one's."""
    nodes: Any = [SimpleNamespace(module=name, parameters=(f"{name}.p",)) for name in ("layer", "last")]
    norms, other = ({"layer.p": value, "last.p": 0.1} for value in (expected, actual))
    require_equal(nodes, (1.0, norms), (1.0, other), EXACT)


@pytest.mark.parametrize("actual", [3.1e-08, 0.0, 9e-08])
def test_what_rounding_leaves_of_a_gradient_is_no_difference(actual: float) -> None:
    compare(1.5e-08, actual)


@pytest.mark.parametrize(("expected", "actual"), [(1e-2, 1.002e-2), (0.0, 1e-6), (1e-5, 1.1e-5), (0.05, float("nan"))])
def test_small_gradients_may_not_differ(expected: float, actual: float) -> None:
    with pytest.raises(VerificationError, match="the gradient of 'layer' has norm"):
        compare(expected, actual)
