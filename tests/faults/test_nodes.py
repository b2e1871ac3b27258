"""Faults of a job of two nodes: network namespaces with process ids, /proc and host name of their own.

Steps take 0.1 s, so that heartbeats have come before the fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.case import Case
from tests.faults.checks import BOUND_S, assert_ended, assert_named
from tests.faults.injection import MESSAGE, NAP_S, Fault
from tests.faults.jobs import run

pytestmark = [pytest.mark.slow, pytest.mark.multinode]
PP = "smddp_pipeline"
SIGKILL = "(?:its process ended|killed by SIGKILL)"  # until its launcher has waited for it
ENDED, CUT = "its process or its connection ended", "its host is down, or the network between the hosts is cut"
STOPPED = "its process is stopped"
IN_STEP = ["forward"]


def two_nodes(kind: str, rank: int, ranks: int, **case: Any) -> Case:
    return Case([Fault(rank, 12, kind, "forward")], world_size=ranks, nodes=2, **{"step_s": 0.1, **case})


def row(name: str, case: Case, *named: Any, everyday: bool = False) -> Any:
    """``named``: ranks of which one is named, the cause, and who says so if not all others."""
    return pytest.param(case, named, id=name, marks=[] if everyday else [pytest.mark.exhaustive])


ONE_OF_NODE_1 = ((2, 3), CUT, [0, 1])  # each side of a cut names a rank of the other


@pytest.mark.parametrize(
    ("case", "named"),
    [
        # Known on both nodes.
        row("kill", two_nodes("kill", 3, 4), ([3], SIGKILL), everyday=True),
        row("torchrun", two_nodes("kill", 3, 4, launcher="torchrun"), ([3], SIGKILL)),
        row("raise", two_nodes("raise", 1, 2), ([1], MESSAGE)),
        # Nobody who lives has seen how it ended.
        row("alone", two_nodes("kill", 1, 2, strategy=PP), ([1], CUT)),
        # On its own node the others see how.
        row("rank 0", two_nodes("kill", 0, 4), ([0], SIGKILL, [1]), ([0], ENDED, [2, 3])),
        row("node 0", two_nodes("node", 0, 4), ([0], ENDED, [2, 3])),
        row("node 1", two_nodes("node", 2, 4), ONE_OF_NODE_1, everyday=True),
        # Looks the same as a dead host.
        row("cut", two_nodes("cut", 3, 4, timeout=3.0), ONE_OF_NODE_1, ([0], CUT, [2, 3]), everyday=True),
        row("cut pipeline", two_nodes("cut", 1, 2, strategy=PP, timeout=3.0), ([0], CUT), ([1], CUT)),
        # Another rank of its node kills it.
        row("stop 0", two_nodes("stop", 0, 4, timeout=3.0), ([0], STOPPED, [1]), ([0], CUT, [2, 3])),
        row("stop 3", two_nodes("stop", 3, 4, timeout=3.0), ([3], STOPPED)),
    ],
)
def test_who_is_named(case: Case, named: Any, tmp_path: Path) -> None:
    result = run(case, tmp_path)
    assert_ended(result, bound_s=min(BOUND_S, case.timeout + 5.0))
    for ranks, cause, *survivors in named:
        said = result.said_by(survivors[0][0]) if survivors else ""
        rank = next((rank for rank in ranks if f"Rank {rank} (host" in said), ranks[0])
        assert_named(result, rank, cause, IN_STEP, *survivors)


def test_the_network_is_away_for_a_moment(tmp_path: Path) -> None:
    result = run(two_nodes("blink", 1, 2, steps=20), tmp_path)
    assert result.codes == [0, 0], result.describe()
    assert not result.left, result.describe()


@pytest.mark.exhaustive
def test_a_stopped_rank_alone_on_its_node_ends_when_it_goes_on(tmp_path: Path) -> None:
    result = run(two_nodes("nap", 1, 2, timeout=3.0), tmp_path)
    assert_ended(result, bound_s=NAP_S + 5.0)
    assert result.ended[0] is not None
    assert result.ended[0] < 3.0 + 5.0, result.describe()
    assert_named(result, 1, CUT, IN_STEP)
