"""What the comparison before training takes for a difference."""

from __future__ import annotations

import pytest

from lightning_smddp.pipeline.partition.self_check import EXACT, Finding, VerificationError, require_equal


def findings(expected: float, actual: float, scale: float = 0.1) -> list[Finding]:
    return [Finding("loss", 1.0, 1.0, 1.0), Finding("bias", expected, actual, scale)]


@pytest.mark.parametrize("actual", [3.1e-08, 0.0, 9e-08])
def test_what_rounding_leaves_of_a_gradient_is_no_difference(actual: float) -> None:
    require_equal(findings(1.5e-08, actual), EXACT)


@pytest.mark.parametrize(("expected", "actual"), [(1e-2, 1.002e-2), (0.0, 1e-6), (1e-5, 1.1e-5), (0.05, float("nan"))])
def test_small_gradients_may_not_differ(expected: float, actual: float) -> None:
    with pytest.raises(VerificationError, match="the gradient of 'bias'"):
        require_equal(findings(expected, actual), EXACT)
