"""Faults of a job of two nodes: network namespaces with process ids, /proc and host name of their own.

Steps take 0.1 s, so that heartbeats have come before the fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import memory
from tests.faults.case import Case
from tests.faults.checks import assert_ended, assert_named
from tests.faults.injection import MESSAGE, NAP_S, Fault
from tests.faults.jobs import Result, run

pytestmark = [pytest.mark.slow, pytest.mark.multinode]
PP = "smddp_pipeline"
SIGKILL = "(?:its process ended|killed by SIGKILL)"  # until its launcher has waited for it
ENDED, CUT = "its process or its connection ended", "its host is down, or the network between the hosts is cut"
IN_STEP = ["forward"]


def two_nodes(kind: str, rank: int, ranks: int, **case: Any) -> Case:
    return Case([Fault(rank, 12, kind, "forward")], world_size=ranks, nodes=2, **{"step_s": 0.1, **case})


@pytest.mark.parametrize(
    ("cause", "case"),
    [
        (SIGKILL, two_nodes("kill", 3, 4)),
        pytest.param(SIGKILL, two_nodes("kill", 3, 4, launcher="torchrun"), marks=pytest.mark.exhaustive),
        pytest.param(
            SIGKILL, two_nodes("oom_kill", 3, 4),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(MESSAGE, two_nodes("raise", 1, 2), marks=pytest.mark.exhaustive),
    ],
    ids=["kill", "torchrun", "oom", "raise"],
)  # fmt: skip
def test_the_cause_is_known_on_both_nodes(cause: str, case: Case, tmp_path: Path) -> None:
    if case.faults[0].kind == "oom_kill" and (reason := memory.no_cgroups()):
        pytest.skip(f"memory cgroups are not permitted here: {reason}")
    result = run(case, tmp_path)
    assert_ended(result)
    assert_named(result, case.faults[0].rank, cause, IN_STEP)


def test_a_rank_alone_on_its_node(tmp_path: Path) -> None:
    """Nobody who lives has seen how it ended."""
    result = run(two_nodes("kill", 1, 2, strategy=PP), tmp_path)
    assert_ended(result)
    assert_named(result, 1, CUT, IN_STEP)


@pytest.mark.exhaustive
def test_rank_0_dies(tmp_path: Path) -> None:
    """On its own node the others see how."""
    result = run(two_nodes("kill", 0, 4), tmp_path)
    assert_ended(result)
    assert_named(result, 0, SIGKILL, IN_STEP, survivors=[1])
    assert_named(result, 0, ENDED, IN_STEP, survivors=[2, 3])


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_node_dies(node: int, tmp_path: Path) -> None:
    result = run(two_nodes("node", 2 * node, 4), tmp_path)
    assert_ended(result)
    if node == 0:
        assert_named(result, 0, ENDED, IN_STEP, survivors=[2, 3])
    else:
        assert_named_one_of(result, (2, 3), CUT, survivors=[0, 1])


def assert_named_one_of(result: Result, ranks: tuple[int, int], cause: str, survivors: list[int]) -> None:
    rank = next((rank for rank in ranks if f"Rank {rank} (host" in result.said_by(survivors[0])), ranks[0])
    assert_named(result, rank, cause, IN_STEP, survivors)


def test_the_network_is_cut(tmp_path: Path) -> None:
    """Which looks the same as a dead host, and each side is the other's."""
    result = run(two_nodes("cut", 3, 4, timeout=3.0), tmp_path)
    assert_ended(result, bound_s=3.0 + 5.0)
    assert_named_one_of(result, (2, 3), CUT, survivors=[0, 1])
    assert_named(result, 0, CUT, IN_STEP, survivors=[2, 3])


@pytest.mark.exhaustive
def test_the_network_of_a_pipeline_is_cut(tmp_path: Path) -> None:
    result = run(two_nodes("cut", 1, 2, strategy=PP, timeout=3.0), tmp_path)
    assert_ended(result, bound_s=3.0 + 5.0)
    for rank in range(2):
        assert_named(result, rank, CUT, IN_STEP)


def test_the_network_is_away_for_a_moment(tmp_path: Path) -> None:
    result = run(two_nodes("blink", 1, 2, steps=20), tmp_path)
    assert result.codes == [0, 0], result.describe()
    assert not result.left, result.describe()


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 3])
def test_a_stopped_rank_is_killed_by_another_of_its_node(rank: int, tmp_path: Path) -> None:
    result = run(two_nodes("stop", rank, 4, timeout=3.0), tmp_path)
    assert_ended(result, bound_s=3.0 + 5.0)
    if rank == 0:
        assert_named(result, 0, "its process is stopped", IN_STEP, survivors=[1])
        assert_named(result, 0, CUT, IN_STEP, survivors=[2, 3])
    else:
        assert_named(result, 3, "its process is stopped", IN_STEP)


@pytest.mark.exhaustive
def test_a_stopped_rank_alone_on_its_node_ends_when_it_goes_on(tmp_path: Path) -> None:
    result = run(two_nodes("nap", 1, 2, timeout=3.0), tmp_path)
    assert_ended(result, bound_s=NAP_S + 5.0)
    assert result.ended[0] is not None
    assert result.ended[0] < 3.0 + 5.0, result.describe()
    assert_named(result, 1, CUT, IN_STEP)
