"""The harness of the multi-rank tests neither hangs, nor hides a failure, nor leaves anything behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import time
import warnings
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import LONGEST
from tests.leaks import SEMAPHORES, Snapshot, child_processes
from tests.programs import ROOT
from tests.rank_processes import GRACE_S
from tests.ranks import RanksFailedError, run_in_threads, run_ranks


def test_the_longest_files_exist() -> None:
    missing = [name for name in LONGEST if not (ROOT / name).exists()]
    assert missing == []


# ---- threads ----


def fail_on_rank_one(group: dist.ProcessGroup) -> None:
    dist.barrier(group=group)  # who failed before another rank has connected to it would make that one fail there
    if group.rank() == 1:
        raise ValueError("bad rank 1")
    dist.all_reduce(torch.ones(1), group=group)


def test_threads_report_a_failure_and_end_the_collectives_of_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="bad rank 1") as caught:
        run_in_threads(fail_on_rank_one, 2)
    assert time.monotonic() - start < GRACE_S
    assert isinstance(caught.value.__cause__, ValueError)
    assert list(caught.value.tracebacks) == [1, 0]
    assert "all_reduce" in caught.value.tracebacks[0]
    assert caught.value.hung == {}


# ---- processes ----


def end_rank_one(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("bad rank 1")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on_rank_one() -> str:
    if dist.get_rank() == 1:
        time.sleep(600)
    return "done"


def leave_a_process(new_session: bool) -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=new_session)


def warn() -> None:
    warnings.warn("about to be deprecated", UserWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("how", "report"),
    [("raise", "bad rank 1"), ("kill", "was killed by SIGKILL")],
)
def test_a_failed_rank_ends_the_run_and_is_reported(how: str, report: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(end_rank_one, 2, how)
    assert time.monotonic() - start < GRACE_S + 10
    assert next(iter(caught.value.tracebacks)) == 1
    assert report in caught.value.tracebacks[1]


@pytest.mark.slow
def test_a_hung_rank_is_killed_and_its_stack_shown() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(hang_on_rank_one, 2, timeout=1.5)
    assert caught.value.tracebacks == {}
    assert list(caught.value.hung) == [1]
    assert "in hang_on_rank_one" in caught.value.hung[1]
    assert child_processes() == set()


def test_a_process_that_a_rank_leaves_behind_is_a_failure() -> None:
    with pytest.raises(RanksFailedError, match="left behind: process .*sleep 600"):
        run_ranks(leave_a_process, 1, False)
    assert child_processes() == set()


def test_ranks_have_the_warning_filters_of_the_test() -> None:
    with pytest.raises(RanksFailedError, match="UserWarning: about to be deprecated"):
        run_ranks(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(warn, 1) == [None]


# ---- leaks ----


def test_leaks_of_each_kind_are_reported() -> None:
    """Environment and process group are put right again."""
    process: Any = multiprocessing.current_process()
    assert process._config["semprefix"] == f"/mp-{SEMAPHORES}"  # until joblib gives them names of its own
    os.environ["HARNESS_OLD"] = "old"
    before = Snapshot.take()
    os.environ |= {"HARNESS_NEW": "1", "HARNESS_OLD": "new"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    segment = shared_memory.SharedMemory(create=True, size=64)
    own, others = Path(f"/dev/shm/sem.mp-{SEMAPHORES}-own"), Path("/dev/shm/sem.mp-others")
    own.touch()
    others.touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        *leaks, listens = before.leaks(patience_s=0.5)
        assert listens.endswith(f"{server.getsockname()[1]:04X}")
    segment.close()
    for path in (own, others):
        path.unlink()
    segment.unlink()
    assert leaks == [
        "environment variable HARNESS_NEW changed from None to '1'",
        "environment variable HARNESS_OLD changed from 'old' to 'new'",
        "the default process group is still initialized",
        *sorted([f"/dev/shm/{segment.name.lstrip('/')} still exists", f"{own} still exists"]),
    ]
    assert not dist.is_initialized()
    assert "HARNESS_NEW" not in os.environ
    assert os.environ.pop("HARNESS_OLD") == "old"


def test_a_process_that_escapes_its_rank_is_reported() -> None:
    before = Snapshot.take()
    run_ranks(leave_a_process, 1, True)
    (leak,) = before.leaks(patience_s=0.05)
    assert "(sleep 600) still runs" in leak
    pid = int(leak.split()[1])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_shared_memory_of_an_unrelated_process_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Snapshot.take()
    segment = shared_memory.SharedMemory(create=True, size=64)
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)  # as seen by a process that is no ancestor of this one
    leaks = before.leaks(patience_s=0.05)
    monkeypatch.undo()
    segment.close()
    segment.unlink()
    assert leaks == []
