"""A rank that dies, raises, stops, or hangs in a kernel or on its host: all ranks end in time, and name it.

The bodies are those of ``tests/strategies/test_device_faults.py``, which runs some of them in `make test` on simulated
devices; there all of them are run by `make exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.strategies import test_device_faults as faults

FAULTS = [
    faults.test_a_rank_that_dies,
    faults.test_a_rank_that_raises,
    faults.a_rank_that_stops,
    faults.a_kernel_that_hangs,
    faults.test_a_host_that_hangs,
]
KINDS = [
    pytest.param("simulated", marks=[pytest.mark.simulated_cuda, pytest.mark.exhaustive]),
    pytest.param("gpu", marks=pytest.mark.gpus(2)),
]


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("strategy", ["smddp", "smddp_pipeline"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.removeprefix("test_"))
def test_fault(
    fault: Callable[..., None], strategy: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(strategy, tmp_path, monkeypatch)


@pytest.mark.parametrize("device", KINDS)
def test_training_again_after_a_failure(device: str) -> None:
    faults.test_groups_that_were_aborted_are_made_anew()
