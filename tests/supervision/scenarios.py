"""What the ranks of the tests do, each in a process of its own: ``python -m tests.supervision.scenarios NAME ...``.

No torch here. Ranks that shall wait for each other do so through files, as they would in a collective.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_smddp.supervision import Supervisor, WatchOptions
from tests.supervision.store import FileStore


@dataclass
class Rank:
    rank: int
    world_size: int
    directory: Path
    options: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.options.get(name)

    def start(self, **more: Any) -> Supervisor:
        options = {
            "collective_timeout": self["collective_timeout"] or 60.0,
            "stop_grace": self["stop_grace"] or 60.0,
            "start_timeout": self["start_timeout"] or 20.0,
            "grace": self["grace"] or 3.0,
            "unwind": self["unwind"] or 8.0,
            "host": f"host{self.rank}",
            **more,
        }
        return Supervisor.start(FileStore(self.directory), WatchOptions(self.rank, self.world_size, **options))

    def meet(self, name: str) -> None:
        """All ranks, as in a collective; waits for ever."""
        (self.directory / f"meet-{name}-{self.rank}").touch()
        for other in range(self.world_size):
            while not (self.directory / f"meet-{name}-{other}").exists():
                time.sleep(0.002)


def say(name: str, value: Any = None) -> None:
    print(name, json.dumps({"value": value}), flush=True)


def as_a_strategy_does(rank: Rank, supervisor: Supervisor, body: Any) -> None:
    try:
        body(rank, supervisor)
    except BaseException as error:
        explained = supervisor.explain(error)
        supervisor.close()
        if explained is error:
            raise
        raise explained from error
    failure = supervisor.close()
    if failure is not None:
        raise failure.error()


# ---- training with a fault ----


def fault(rank: Rank, kind: str) -> None:
    if kind == "exit":
        os._exit(0)
    elif kind == "sys.exit":
        sys.exit(0)
    elif kind == "raise":
        raise KeyError("the first cause")
    elif kind == "oom":
        raise MemoryError("no room")
    elif kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "children":
        subprocess.Popen(["sleep", "30"], start_new_session=False)
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.Signals[kind])


def steps(rank: Rank, supervisor: Supervisor) -> None:
    say("ready", os.getpid())
    for step in range(rank["steps"] or 10):
        supervisor.progress.step, supervisor.progress.phase = step, "forward"
        if stop := supervisor.gate(step):
            say("stop", [stop.signum, stop.step, stop.agreed])
            sys.exit(128 + stop.signum)
        supervisor.progress.phase = "backward"
        if rank["fault"] == [rank.rank, step]:
            fault(rank, rank["kind"])
        if rank["meet"]:
            rank.meet(str(step))
        time.sleep(rank["pause"] or 0.0)
    supervisor.progress.phase = "validation"
    say("validation")
    waits = rank["sleep"] or 0.0
    if rank["sleep_in_python"]:
        end = time.monotonic() + waits
        while time.monotonic() < end:
            time.sleep(0.01)
    else:
        time.sleep(waits)


def train(rank: Rank) -> None:
    supervisor = rank.start(parent_pid=os.getppid() if rank["watch_parent"] else None)
    supervisor.at_emergency(lambda: say("cleaned", supervisor.failure is not None))
    if rank["signals"]:
        supervisor.install_signals()
    if rank["hang_in_clean_up"]:
        supervisor.at_emergency(lambda: time.sleep(60))
    if rank["slow_teardown"] and rank.rank == rank["slow_teardown"][0]:
        try:
            steps(rank, supervisor)
        except KeyError as error:
            supervisor.explain(error)
            time.sleep(60)
    as_a_strategy_does(rank, supervisor, steps)
    say("finished")


# ---- strangers ----


def visited(rank: Rank) -> None:
    """Rank 0 waits for rank 1, which lets strangers in first."""
    logging.basicConfig(level=logging.WARNING)
    store = FileStore(rank.directory)
    strangers = []
    if rank.rank == 1:
        while not store.check(["smddp/supervision/1"]):
            time.sleep(0.01)
        found = json.loads(store.get("smddp/supervision/1"))
        say("listens", found["addresses"][0])
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 10000,
            b'{"secret": "wrong", "rank": 1}\n',
            b"[" * 3000 + b"\n",
            b"",
        ):
            strangers.append(socket.create_connection((found["addresses"][0], found["port"])))
            strangers[-1].sendall(data)
        time.sleep(0.3)
        greeting = {"secret": found["secret"], "rank": 7, "world_size": 2, "host": "x", "process": [1, 2, ""]}
        strangers.append(socket.create_connection((found["addresses"][0], found["port"])))
        strangers[-1].sendall(json.dumps({**greeting, "descriptor": 0}).encode() + b"\n")
        time.sleep(0.1)
    supervisor = rank.start()
    steps(rank, supervisor)
    if rank.rank == 1:
        for stranger in strangers:
            stranger.close()
    say("failure", supervisor.failure and supervisor.failure.describe())
    supervisor.close()


# ---- agreement ----


def rounds_of_stops(rank: Rank) -> None:
    """In each round some ranks ask to stop, at random times, while all run with random delays."""
    chance = random.Random(rank["seed"] + rank.rank)
    common = random.Random(rank["seed"])
    for number in range(rank["rounds"]):
        supervisor = rank.start()
        asking = common.sample(range(rank.world_size), common.randint(1, rank.world_size))
        in_step = common.random() < 0.5
        timer = threading.Timer(chance.random() * 0.05, supervisor.request_stop, [signal.SIGTERM])
        if rank.rank in asking:
            timer.start()
        step = first = common.choice([0, 1, 1000])
        while True:
            if stop := supervisor.gate(step):
                say("stop", [number, stop.step - first, stop.agreed, stop.signum])
                break
            if in_step:
                rank.meet(f"{number}-{step}")
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.004)
            step += 1
        if rank.rank in asking:
            timer.join()
        supervisor.close()


def stop_without_gates(rank: Rank) -> None:
    """The main thread never comes to a gate."""
    supervisor = rank.start()
    supervisor.install_signals()
    supervisor.at_emergency(lambda: say("cleaned"))
    say("ready", os.getpid())
    time.sleep(60)


# ---- epochs ----


def epochs(rank: Rank) -> None:
    supervisor = rank.start()

    def body(rank: Rank, supervisor: Supervisor) -> None:
        for epoch in range(2):
            supervisor.progress.start_epoch(epoch)
            batches = rank["batches"][rank.rank][epoch]
            for batch in range(batches):
                supervisor.progress.batches = batch + 1
                if rank["meet"]:
                    rank.meet(f"{epoch}-{batch}")
            if rank["leaves"] == rank.rank and epoch == 1:
                return
            supervisor.end_of_epoch(epoch, batches)
            say("epoch", epoch)
            rank.meet(f"{epoch} is over")  # lest a failure of the next one comes to a rank that is about to say so

    as_a_strategy_does(rank, supervisor, body)


# ---- life of a supervisor ----


def descriptors() -> list[str]:
    found = []
    for name in sorted(os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
    return sorted(found)


def open_and_close(rank: Rank) -> None:
    before, handlers = descriptors(), (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1))
    for _ in range(3):
        supervisor = rank.start(parent_pid=os.getppid())
        supervisor.install_signals()
        steps(rank, supervisor)
        if os.fork() == 0:
            supervisor.close()  # of no effect here
            inside = [name for name in descriptors() if "socket" in name or "pidfd" in name or "memfd" in name]
            same = (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == handlers
            say("child", [inside, same])
            os._exit(0)
        os.wait()
        assert supervisor.close() is None
        assert supervisor.close() is None
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    assert descriptors() == before
    say("same", (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == handlers)


def late(rank: Rank) -> None:
    supervisor = rank.start()
    progress = supervisor.progress
    progress.step, progress.phase = rank["steps_of"][rank.rank], rank["phase_of"][rank.rank]
    rank.meet("progress")
    if rank.rank != rank["asks"]:
        say("ready")
        while supervisor.failure is None:
            time.sleep(0.01)
        raise supervisor.failure.error()
    error = supervisor.explain(RuntimeError("[gloo] Timed out waiting 2000ms for recv operation to complete"))
    say("error", [type(error).__name__, str(error)])
    supervisor.close()
    os._exit(3)


def alone(rank: Rank) -> None:
    """Starts, and says why it could not."""
    try:
        supervisor = rank.start()
    except RuntimeError as error:
        say("error", [type(error).__name__, str(error)])
        return
    supervisor.close()


# ---- hooks for exceptions ----


def upload(rank: Rank) -> None:
    """Rank ``fails`` is in a hook for ``seconds``; the others wait for its process in C, as in gloo, or follow it."""
    supervisor = rank.start()
    supervisor.install_signals()
    supervisor.allow_hooks(rank["allowed"])
    supervisor.at_emergency(lambda: say("cleaned"))  # where rank 0 ends the ranks that it has started
    fails = rank["fails"] == rank.rank
    with open(rank.directory / "connection", "a") as connection:
        if fails:
            fcntl.flock(connection, fcntl.LOCK_EX)
        rank.meet("connected")
        error = KeyError("the first cause")
        if not fails and rank["follows"]:
            supervisor._state.wait_for(lambda: False, 20.0)
        elif not fails:
            fcntl.flock(connection, fcntl.LOCK_EX)
        explained = supervisor.explain(error)
        supervisor.postpone(rank["allowed"])
        say("begun")
        if fails:
            time.sleep(rank["seconds"])
        say("uploaded")
        supervisor.await_first(rank["allowed"])
        supervisor.close()
        say("ended", time.time())
        raise explained


def main() -> None:
    name, number, world_size, directory, options = sys.argv[1:]
    globals()[name](Rank(int(number), int(world_size), Path(directory), json.loads(options)))


if __name__ == "__main__":
    main()
