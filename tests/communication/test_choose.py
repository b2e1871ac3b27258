"""``algorithm="auto"``: what is measured and chosen."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication import choose as choose_module
from lightning_smddp.communication.choose import Choice, choose
from lightning_smddp.communication.communicator import Communicator
from tests.ranks import run_each, run_ranks

TIMES = {"native": 3e-3, "hierarchical": 2e-3, "balanced": 1e-3}
EQUAL = dict.fromkeys(TIMES, 1e-3)


def communicate() -> Communicator:
    return Communicator(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=20))


def chosen(cap: float | None = None, times: dict[str, float] | None = None) -> Choice:
    def time(name: str, _communicator: Any, _compression: Any, size: int) -> float:
        return times[name]

    if times is not None:
        choose_module.time_algorithm = time
    communicator = communicate()
    choice = choose(communicator, nn.Linear(1000, 1000, bias=False), None, cap)
    communicator.close()
    return choice


@pytest.mark.slow
def test_all_ranks_measure_and_choose_the_same() -> None:
    choices = run_ranks(chosen, 4, node_ids=list("abab"))
    assert all(choice == choices[0] for choice in choices)
    assert list(choices[0].seconds) == ["native", "hierarchical", "balanced"]
    assert min(choices[0].seconds.values()) > 0
    assert choices[0].algorithm == min(choices[0].seconds, key=choices[0].seconds.__getitem__)


CASES = [
    (None, TIMES, Choice("balanced", 4_000_000, TIMES)),
    (2.0, TIMES, Choice("balanced", 2 * 2**20, TIMES)),
    (None, EQUAL, Choice("native", 4_000_000, EQUAL)),
]


def test_the_fastest_at_the_size_of_a_bucket() -> None:
    found = run_ranks(run_each, 2, chosen, [case[:2] for case in CASES], node_ids=list("ab"))
    assert found == [[choice for *_, choice in CASES]] * 2
    assert run_ranks(chosen, 1, None, {}) == [Choice("native")]  # nothing to choose


def test_one_line_says_it() -> None:
    assert str(Choice("balanced")) == "balanced"
    measured = Choice("hierarchical", 2**22, {"native": 0.00302, "hierarchical": 0.0021})
    assert str(measured) == "hierarchical (measured at 4 MiB: native 3.02 ms, hierarchical 2.1 ms)"
