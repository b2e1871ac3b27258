"""Processes and signals: the right one is killed, its end is known, and nobody's handlers are lost."""

from __future__ import annotations

import ipaddress
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.futures import Future

from lightning_smddp.communication.errors import RankFailedError, RankTimeoutError
from lightning_smddp.supervision import acceptor, peer
from lightning_smddp.supervision.acceptor import listen
from lightning_smddp.supervision.failure import Failure, is_of_communication, is_timeout, text_of
from lightning_smddp.supervision.loop import Loop
from lightning_smddp.supervision.peer import OomWatch
from lightning_smddp.supervision.processes import Process, ending, has_ended, oom_counters, oom_kills
from lightning_smddp.supervision.progress import Progress, RemoteProgress
from lightning_smddp.supervision.shutdown import InterruptionError
from lightning_smddp.supervision.signals import Signals

FAILURE = Failure(1, "a", 12, 7, "backward", "exception", "ValueError: bad\nsecond line", 1.5)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda p: p.kill(), "was killed by SIGKILL"),
        (lambda p: p.terminate(), "was killed by SIGTERM"),
        (lambda p: p.stdin.close(), "exited with code 0"),
    ],
)
@pytest.mark.parametrize("reaped", [False, True])
def test_the_end_of_a_process_is_known_without_being_its_parent(
    end: Callable[[subprocess.Popen[bytes]], None], how: str, reaped: bool
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        process = Process.of(child.pid)
        descriptor = process.open()
        assert descriptor is not None
        try:
            assert process.exists()
            assert not has_ended(descriptor)
            end(child)
            assert select.select([descriptor], [], [], 10)[0]
            if reaped:
                child.wait()
            assert ending(child.pid, descriptor) in ([how, "ended"] if reaped else [how])  # Linux before 6.15
            assert not process.exists()
        finally:
            os.close(descriptor)


def test_a_later_process_with_the_same_number_is_not_killed() -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        process = Process.of(child.pid)
        earlier = replace(process, start=process.start - 1)
        elsewhere = replace(process, namespace="other host")
        assert not earlier.exists()
        assert (earlier.kill(), elsewhere.kill(), replace(process, start=0).kill()) == (False, False, False)
        assert child.poll() is None
        assert process.kill()
        assert child.wait() == -signal.SIGKILL


FORKS = """
import os, subprocess, sys, time
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
    children.append(pid)
helper = subprocess.Popen(["sleep", "60"])
print(*children, helper.pid, flush=True)
time.sleep(60)
"""


def test_a_stopped_process_is_killed_with_its_workers_but_not_with_ranks_and_helpers() -> None:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        worker, rank, helper = (Process.of(int(pid)) for pid in child.stdout.readline().split())
        child.send_signal(signal.SIGSTOP)
        assert Process.of(child.pid).kill_with_workers(spare=[rank.pid])
        child.wait()
        time.sleep(0.1)
        assert [process.exists() for process in (worker, rank, helper)] == [False, True, True]
        rank.kill()
        helper.kill()


def test_oom_kills_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And forgotten after ten ticks."""
    events = tmp_path / "memory.events"
    counters = (str(events), str(tmp_path / "none"))
    monkeypatch.setattr(peer, "oom_counters", lambda pid: counters)
    assert oom_kills(counters) == 0
    events.write_text("low 0\noom 9\noom_kill 2\n")
    assert oom_kills(counters) == 2
    watch = OomWatch(Process.of(os.getpid()))
    assert not watch.happened()
    events.write_text("oom_kill 50000\n")
    for _ in range(10):
        assert watch.happened()
        watch.tick()
    assert not watch.happened()
    events.write_text("oom_kill 50001\n")
    assert watch.happened()
    counters = (str(tmp_path / "another"),)  # it moved to another cgroup, in which nothing has happened yet
    watch.tick()
    assert not watch.happened()


def test_kills_are_counted_in_the_cgroup_of_the_process_or_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job that is killed beside this one is none of its own."""
    mine = f"/proc/{os.getpid()}/cgroup"
    files = {mine: "5:cpu:/job\n4:memory:/job\n0::/job\n"}
    there = {"/sys/fs/cgroup/memory/job/memory.oom_control"}
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    monkeypatch.setattr(os.path, "exists", lambda path: path in there)
    assert oom_counters(os.getpid()) == ("/sys/fs/cgroup/memory/job/memory.oom_control",)
    there.add("/sys/fs/cgroup/job/memory.events")
    assert oom_counters(os.getpid())[1:] == ("/sys/fs/cgroup/job/memory.events",)
    there.clear()
    assert oom_counters(os.getpid()) == ("/proc/vmstat",)


def test_progress_is_seen_from_elsewhere_and_keeps_its_values() -> None:
    progress = Progress()
    other = RemoteProgress(os.getpid(), progress.descriptor)
    progress.step, progress.phase = 3, "forward"
    progress.start_epoch(2)
    progress.batches = 5
    assert (other.read().step, other.read().phase, other.read().epoch, other.read().batches) == (3, "forward", 2, 5)
    progress.start_epoch(3)
    assert other.read().batches == 0
    other.close()
    progress.close()
    progress.close()
    progress.step += 1
    assert (progress.step, progress.phase, progress.epoch, other.read().step) == (4, "forward", 3, 3)
    with pytest.raises(ValueError, match="phase='fast' is unknown. Valid: .*'forward'"):
        progress.phase = "fast"


# ---- failures ----


def test_a_failure_is_one_line_and_travels() -> None:
    expected = "rank 1 (host a, process 12) failed at step 7 (backward): ValueError: bad second line"
    assert FAILURE.describe() == expected
    assert Failure.from_json(FAILURE.to_json()) == FAILURE
    with pytest.raises(ValueError, match="unknown kind"):
        Failure.from_json({**FAILURE.to_json(), "kind": "strange"})
    assert replace(FAILURE, step=-1, phase="").describe().startswith("rank 1 (host a, process 12) failed: ")


def test_errors_survive_pickling() -> None:
    interruption = type("RankFailedError", (InterruptionError,), {"failure": FAILURE})()
    for error in (RankTimeoutError(3, "late"), FAILURE.error(), interruption):
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.rank, str(copy)) == (error.rank, str(error))
    assert isinstance(copy, RankFailedError)


@pytest.mark.parametrize(
    ("error", "communication", "timeout"),
    [
        (ValueError("Connection closed by peer"), False, False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"), True, False),
        (
            RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc] Timed out waiting"),
            True,
            True,
        ),
        (RankTimeoutError(1, "late"), True, True),
        (RankFailedError(1, "gone"), True, False),
        (TimeoutError("timed out"), False, False),
    ],
)
def test_errors_of_communication_are_known(error: BaseException, communication: bool, timeout: bool) -> None:
    assert (is_of_communication(error), is_timeout(error)) == (communication, timeout)


@pytest.mark.parametrize(
    ("error", "communication", "timeout"),
    [
        (RankTimeoutError(1, "late"), True, True),
        (RankFailedError(1, "gone"), True, False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"), True, False),
        (ValueError("bad"), False, False),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_they_are_known_from_the_callback_of_a_future(
    error: BaseException, communication: bool, timeout: bool, depth: int
) -> None:
    """Where DDP's communication hooks wait for other ranks; their type is lost there."""

    def fail(future: Future[None]) -> None:
        raise error

    first: Future[None] = Future()
    last = first.then(fail)
    for _ in range(1, depth):
        last = last.then(lambda future: future.wait())
    first.set_result(None)
    with pytest.raises(RuntimeError) as raised:
        last.wait()
    assert type(raised.value) is RuntimeError
    assert (is_of_communication(raised.value), is_timeout(raised.value)) == (communication, timeout)


def test_a_lack_of_memory_is_called_so() -> None:
    assert text_of(RuntimeError("CUDA error: out of memory")).startswith("out of memory (OOM): RuntimeError: CUDA")
    assert text_of(KeyError("x")) == "KeyError: 'x'"
    assert len(text_of(ValueError("x" * 10**6))) == 2000


# ---- addresses ----


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_hub_listens_on_the_given_address_only(address: str) -> None:
    with listen(address) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]).is_loopback


@pytest.mark.parametrize("numbers", [["0.0.0.0"], ["::"], [], ["192.0.2.77"]])
def test_the_hub_never_listens_everywhere(numbers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on another machine's address: on the interface of the default route, or not at all."""
    monkeypatch.setattr(acceptor, "_numbers_of", lambda address: numbers)
    monkeypatch.setattr(acceptor, "_default_route", lambda: "127.0.0.2")
    with listen("name") as listener:
        assert listener.getsockname()[0] == "127.0.0.2"
    monkeypatch.setattr(acceptor, "_default_route", lambda: None)
    with pytest.raises(ValueError, match="cannot listen on the address 'name' of rank 0"):
        listen("name")


# ---- signals ----


def test_handlers_and_wakeup_descriptors_of_others_go_on() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    theirs = signal.getsignal(signal.SIGTERM)
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    old_wakeup = signal.set_wakeup_fd(sender.fileno())
    loop = Loop()
    try:
        signals = Signals(loop, came.append, [signal.SIGTERM, signal.SIGUSR2])
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        loop.later(0.2, loop.stop)
        loop.run()
        assert came == [signal.SIGTERM] * 2  # each once, though seen by two ways
        assert receiver.recv(10) == bytes([signal.SIGTERM] * 2)
        signals.restore()
        signals.close()
        assert signal.getsignal(signal.SIGTERM) is theirs
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == sender.fileno()
    finally:
        signal.set_wakeup_fd(old_wakeup)
        signal.signal(signal.SIGTERM, before)
        loop.close()
        receiver.close()
        sender.close()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    loop = Loop()
    try:
        signals = Signals(loop, lambda signum: None, [signal.SIGUSR2])
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        signals.restore()
        signals.close(watched=False)
    finally:
        signal.signal(signal.SIGUSR2, before)
        loop.close()
