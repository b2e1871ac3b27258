"""Whatever happens to one rank, the others end and name it. Kinds of faults in real runs: ``tests/faults``."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_smddp.supervision import supervisor
from lightning_smddp.supervision.board import Failure
from tests.supervision.jobs import Rank, run


def hold(seconds: float, rank: Rank) -> None:
    """By code in C."""
    if rank.rank == 1:
        ctypes.PyDLL(None).sleep(int(seconds))


def held_for_ever(rank: Rank) -> None:
    rank.steps({8: partial(hold, 1000)})


def held_when_told_to_stop(rank: Rank) -> None:
    hold(1000, rank)
    time.sleep(2.0)
    os.kill(os.getpid(), signal.SIGTERM)
    while not rank.supervisor.own.signal:
        time.sleep(0.1)
    rank.supervisor.gate(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "limits", "text"),
    [
        (held_for_ever, {"gloo": 2.0, "timeout": 2.0}, "[Rr]ank 1 .* fell silent.*Timed out waiting.*runs no Python"),
        (
            held_when_told_to_stop,
            {"grace": 2.0},
            "rank 0 .* ended, exit code 143. Cause: it did not stop within 2 s of SIGTERM; rank 1 .* has not said",
        ),
    ],
)
def test_a_rank_that_runs_no_python_is_killed(body: Any, limits: Any, text: str, tmp_path: Path) -> None:
    """When the collective times out, or when the time for a stop is over."""
    ended = run(body, 2, tmp_path, **limits)
    assert "killed by SIGKILL" in ended.ends[1]
    assert re.search(text, ended.said(0))


def stop_all(rank: Rank) -> None:
    if rank.rank == 0:
        pids = " ".join(map(str, rank.pids))
        subprocess.Popen(["sh", "-c", f"kill -STOP {pids}; sleep 4.5; kill -CONT {pids}"]).wait()


def held_and_stopped(rank: Rank) -> int:
    return rank.steps({8: partial(hold, 7), 10: stop_all}, steps=20, pause=0.2)


@pytest.mark.slow
def test_a_healthy_job_is_left_alone(tmp_path: Path) -> None:
    """T1: while a rank's interpreter is held for long; T4: when it is stopped as a whole, and goes on."""
    assert run(held_and_stopped, 2, tmp_path, timeout=3.0).results == [-1, -1]


def sleep_until_it_is_said(rank: Rank) -> None:
    until = time.monotonic() + 30.0
    while rank.rank == 1 and time.monotonic() < until:
        time.sleep(0.1)
        if "It is here" in (rank.directory / "0.err").read_text():
            time.sleep(1.5)  # in which it would be said again
            return


def waited_for(rank: Rank) -> int:
    supervisor.NOTE_HANG_S = 1.5
    return rank.steps({8: sleep_until_it_is_said}, steps=12)


@pytest.mark.slow
def test_a_rank_that_all_others_wait_for_says_where_it_is_once(tmp_path: Path) -> None:
    ended = run(waited_for, 3, tmp_path)
    assert ended.results == [-1, -1, -1]  # nothing is ended
    for text, times in zip(ended.written, (1, 1, 0), strict=True):
        assert text.count("all others have waited for rank 1") == times
        assert text.count("in sleep_until_it_is_said") == times
    assert "at step 8 (forward) for 1.5 s. It is here:" in ended.written[0]


def die_and_have_all_told_to_stop(rank: Rank) -> None:
    if rank.rank == 1:
        first, own, last = rank.pids
        subprocess.Popen(["sh", "-c", f"kill -KILL {own}; kill -TERM {first} {last}"]).wait()


def told_to_stop_behind_a_death(rank: Rank) -> None:
    rank.steps({8: die_and_have_all_told_to_stop}, steps=10000)


@pytest.mark.slow
def test_a_launchers_sigterm_behind_a_death_is_no_request_to_stop(tmp_path: Path) -> None:
    """T9: torchrun sends it to all ranks when one has ended."""
    ended = run(told_to_stop_behind_a_death, 3, tmp_path)
    for survivor in (0, 2):
        assert re.search(r"[Rr]ank 1 .* died.* its process (ended|was)", ended.said(survivor))


# ---- what ranks do when the store has gone ----


def silent_store(rank: Rank) -> tuple[str, int]:
    """It gives no answer for so long that it counts as lost, and then does answer."""
    watching = rank.supervisor
    board, answers, asked = watching._board, threading.Event(), []
    look = board.look

    def late() -> str:
        answers.wait()
        board.tell = board.set_once = asked.append  # type: ignore[assignment]
        return look()

    board.look = late  # type: ignore[method-assign]
    while watching.failure is None:
        time.sleep(0.01)
    answers.set()
    watching.explain(watching.failure.error())
    watching.close()
    kind, watching.failure = watching.failure.kind, None
    return kind, len(asked)


def test_the_store_is_not_asked_again_once_it_was_given_up(tmp_path: Path) -> None:
    """T11: a server that is stopped would hold whoever asks it, and a dead one's clients print frames of C++."""
    assert run(silent_store, 1, tmp_path, timeout=3.0).results == [("fell silent", 0)]


def failure_behind_the_loss(rank: Rank) -> None:
    """A collective breaks when the store does, and who was first is known a moment later."""
    rank.supervisor._lost = True
    first = Failure(1, "died", "Rank 1 (host b, process 2) died at step 7 (data): it was killed")
    threading.Timer(0.4, rank.supervisor._record, [first]).start()
    raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")


def test_an_error_waits_for_the_failure_that_comes_behind_the_loss_of_the_store(tmp_path: Path) -> None:
    """T10: else it would go on without a name."""
    text = "RankFailedError: Rank 1 (host b, process 2) died at step 7 (data): it was killed"
    assert text in run(failure_behind_the_loss, 1, tmp_path).ends[0]


# ---- hangs where nothing raises ----


def stand(has_work: bool, rank: Rank) -> float:
    """In code of the user's, rank 1 one step behind. After how many seconds the device was asked."""
    asked: list[float] = []

    def ask() -> bool:
        asked.append(time.monotonic())
        return has_work

    rank.supervisor.begin_batch(3 - rank.rank, 1)
    rank.supervisor.begin("backward")
    rank.supervisor.has_work = ask
    begin = time.monotonic()
    time.sleep(30.0 if has_work else 6.0)
    return asked[0] - begin


def test_a_host_that_stands_while_its_device_has_work_left_is_ended(tmp_path: Path) -> None:
    ended = run(partial(stand, True), 2, tmp_path, timeout=4.0)
    text = r"Rank 1 \(host \S+, process \d+\) did not come at step 2 \(backward\): rank \d .* waited 4 s for it; its "
    for rank in (0, 1):
        assert re.search(text + "device has work left", ended.said(rank))
        assert "exit code 1" in ended.said(rank)


@pytest.mark.slow
def test_a_host_that_stands_while_its_device_has_none_is_let_alone(tmp_path: Path) -> None:
    """The device is not asked at once: a graph might be captured."""
    assert min(run(partial(stand, False), 2, tmp_path, timeout=4.0).results) > 1.5
