"""Starting, epochs, and ends that are no failures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT
from tests.supervision import scenarios
from tests.supervision.jobs import job


@pytest.mark.parametrize("world_size", [1, 3])
def test_supervisors_leave_nothing_behind(tmp_path: Path, world_size: int) -> None:
    with job(tmp_path, scenarios.open_and_close, world_size) as started:
        started.wait()
        for rank in started.ranks:
            assert rank.code == 0, started.text()
            assert rank.values("child") == [True] * 3
            assert rank.values("same") == [True]
            assert rank.values("left") == [[]]
            assert rank.values("descriptors")[0] <= 0
            assert rank.err == ""  # T3


PROGRAM = """
import sys
import torch.distributed as dist
from lightning_smddp.supervision import Supervisor

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
supervisor = Supervisor(store, rank, 2, 60.0, agent_serves=True)
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_without_a_goodbye_does_not_abort(tmp_path: Path) -> None:
    """T6: a thread that comes out of C++ behind the interpreter's end."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store.port)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ends = [rank.communicate(timeout=60.0)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert ends == ["", ""]


def test_a_workers_sigterm_is_not_the_jobs(tmp_path: Path) -> None:
    """T5."""
    with job(tmp_path, scenarios.forked_worker, 1) as started:
        started.wait()
        assert started.ranks[0].values("seen") == [[-15, None]], started.text()


def test_equal_epochs_end_together(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.epochs, 3, batches=[[4, 5]] * 3, collectives=True) as started:
        started.wait()
        assert [(rank.code, rank.values("epoch")) for rank in started.ranks] == [(0, [0, 1])] * 3, started.text()


@pytest.mark.parametrize(("collectives", "fewer", "first"), [(True, 1, 0), (False, 0, 1)])
def test_uneven_epochs_fail_at_once_and_name_both_numbers(
    tmp_path: Path, collectives: bool, fewer: int, first: int
) -> None:
    batches = [[4, 4], [4, 4], [4, 4]]
    for rank in range(3):
        batches[rank][first] = 3 if rank == fewer else 5
    with job(tmp_path, scenarios.epochs, 3, batches=batches, collectives=collectives) as started:
        started.until("epoch") if first else None
        assert started.wait() < 8.0
        for rank in started.ranks:
            assert rank.code == 1
            assert rank.values("epoch") == list(range(first))
            assert re.search(rf"Rank {fewer} \(host \S+, process \d+\) left", rank.err), started.text()
            assert f"rank {fewer} ended epoch {first} after 3 batches" in rank.err
            assert re.search(r"and rank \d has begun [45] ", rank.err)
            assert "`trainer.should_stop`, all ranks have to" in rank.err


def test_a_rank_that_ends_its_run_while_others_wait_for_it_has_left(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.epochs, 2, batches=[[2, 2], [2, 2]], leaves=1) as started:
        assert started.wait() < 6.0
        text = "it ended its run, but rank 0 ended epoch 1 after 2 batches"
        assert text in started.ranks[0].err, started.text()
