"""Starting, strangers at the door, epochs, and ends that are no failures."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.supervision.jobs import job, kill


@pytest.mark.parametrize("world_size", [1, 3])
def test_supervisors_leave_nothing_behind_and_children_hold_nothing(tmp_path: Path, world_size: int) -> None:
    with job(tmp_path, "open_and_close", world_size, steps=2) as started:
        started.wait(10.0)
        for rank in started.ranks:
            assert rank.code == 0, started.text()
            assert rank.values("child") == [[[], True]] * 3
            assert rank.values("same") == [True]
            assert rank.err == ""


def test_strangers_are_dropped_and_training_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, "visited", 2, meet=True) as started:
        started.wait(15.0)
        assert [rank.code for rank in started.ranks] == [0, 0], started.text()
        assert [rank.values("failure") for rank in started.ranks] == [[None], [None]]
        assert started.ranks[1].values("listens") == ["127.0.0.1"]
        dropped = [line for line in started.ranks[0].err.splitlines() if "dropped a connection" in line]
        assert len(dropped) == len(started.ranks[0].err.splitlines()) == 5, started.text()
        reasons = ["it sent what is no message", "it sent more than 4096 bytes", "wrong secret", "it is rank 7 of 2"]
        assert all(any(reason in line for line in dropped) for reason in reasons)


@pytest.mark.slow
def test_a_rank_that_does_not_start_is_named_by_all(tmp_path: Path) -> None:
    with job(tmp_path, "alone", 3, start_timeout=1.0) as started:
        kill(started.ranks[2].pid)
        started.wait(10.0)
        text = "of 3 ranks, these did not start within 1 s: 2"
        for rank in started.ranks[:2]:
            ((name, message),) = rank.values("error")
            assert name == "RankTimeoutError"
            assert message.endswith(text)


def test_equal_epochs_end_together(tmp_path: Path) -> None:
    with job(tmp_path, "epochs", 3, batches=[[4, 5]] * 3, meet=True) as started:
        started.wait(10.0)
        assert [(rank.code, rank.values("epoch")) for rank in started.ranks] == [(0, [0, 1])] * 3, started.text()


@pytest.mark.parametrize(
    ("meet", "fewer", "first"),
    [pytest.param(True, 0, 1, marks=pytest.mark.exhaustive), (True, 1, 0), (False, 0, 1)],
)
def test_uneven_epochs_fail_and_name_both_numbers(tmp_path: Path, meet: bool, fewer: int, first: int) -> None:
    batches = [[4, 4], [4, 4], [4, 4]]
    for rank in range(3):
        batches[rank][first] = 3 if rank == fewer else 5
    with job(tmp_path, "epochs", 3, batches=batches, meet=meet) as started:
        assert started.wait(10.0) < 5.0
        for rank in started.ranks:
            assert rank.code == 1
            assert rank.values("epoch") == list(range(first))
            assert f"Rank {fewer} (host host{fewer}, process {started.ranks[fewer].pid}) left" in rank.last_line
            few, many = f"(host host{fewer}) ended epoch {first} after 3", f"ended epoch {first} after 5"
            assert few in rank.last_line
            assert many in rank.last_line or re.search("is in batch [45] of it", rank.last_line)
            assert "`trainer.should_stop`, all ranks have to" in rank.last_line


def test_a_rank_that_ends_its_run_while_others_wait_for_it_has_left(tmp_path: Path) -> None:
    with job(tmp_path, "epochs", 2, batches=[[2, 2], [2, 2]], leaves=1) as started:
        assert started.wait(10.0) < 3.0
        assert "it ended its run while rank 0 (host host0) waited for it at the end of epoch 1" in started.ranks[0].err


@pytest.mark.slow
def test_one_rank_alone_is_supervised_without_sockets(tmp_path: Path) -> None:
    with job(tmp_path, "train", 1, steps=5, signals=True, sleep=60) as started:
        started.until("validation")
        links = [path.readlink().name for path in Path(f"/proc/{started.ranks[0].pid}/fd").iterdir()]
        assert not any(name.startswith("socket") for name in links)
        kill(started.ranks[0].pid, 15)
        started.until_heard(0)
        time.sleep(1.2)
        kill(started.ranks[0].pid, 15)
        started.wait(5.0)
        assert started.ranks[0].code == 143
