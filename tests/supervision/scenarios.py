"""What the ranks of the tests do, each in a process of its own."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.supervision import Failure, Supervisor, supervisor
from tests.supervision.jobs import Rank, say


def as_a_strategy_does(rank: Rank, body: Callable[[Rank, Supervisor], None]) -> None:
    watching = rank.start()
    if rank["signals"]:
        watching.signals.take()
    try:
        body(rank, watching)
    except BaseException as error:
        explained = watching.explain(error)
        watching.close()
        if explained is error:
            raise
        raise explained from error
    failure = watching.close()
    if failure is not None:
        raise failure.error()


def fault(kind: str) -> None:
    if kind == "exit":
        os._exit(0)
    elif kind == "sys.exit":
        sys.exit(0)
    elif kind == "raise":
        raise KeyError("the first cause")
    elif kind == "loop":
        while True:
            pass
    elif kind == "sleep":
        time.sleep(1000)
    elif kind == "hold the interpreter":
        ctypes.PyDLL(None).sleep(1000)
    elif kind == "children":  # which hold its sockets
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.Signals[kind])


def train(rank: Rank) -> None:
    """Steps with a collective in each; at one of them a rank fails as ``kind`` says."""
    seconds = rank["gloo_timeout"] or 60.0
    dist.init_process_group(
        "gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size, timeout=timedelta(seconds=seconds)
    )
    supervisor.NOTE_HANG_S = rank["note_hang_s"] or supervisor.NOTE_HANG_S
    as_a_strategy_does(rank, steps)
    say("finished")


def steps(rank: Rank, watching: Supervisor) -> None:
    say("ready", os.getpid())
    for step in range(rank["steps"] or 40):
        watching.step, watching.phase = step, "forward"
        if watching.gate(step):
            say("stop", step)
            sys.exit(128 + int(watching.stop_signal or 0))
        time.sleep(rank["pause"] or 0.0)
        if rank["fails"] == rank.rank and step == 8:
            if rank["kind"] == "nap":  # in C code, which holds the interpreter
                ctypes.PyDLL(None).sleep(rank["seconds"])
            elif rank["kind"] is not None:
                time.sleep(1.6)  # a beat has said where it is, and others have read it: each twice a second
                fault(rank["kind"])
        watching.phase = "backward"
        dist.all_reduce(torch.ones(1))


def stop_without_gates(rank: Rank) -> None:
    """The main thread never comes to a gate."""
    watching = rank.start()
    watching.signals.take()
    say("ready")
    time.sleep(60)


def replaced_wakeup(rank: Rank) -> None:
    """As ``asyncio``'s signal handlers do, in the main thread."""
    watching = rank.start()
    watching.signals.take()
    signal.set_wakeup_fd(-1)
    os.kill(os.getpid(), signal.SIGTERM)
    began = time.monotonic()
    step = 0
    while not watching.gate(step):
        step += 1
    say("stopped", time.monotonic() - began)
    watching.close()


def rounds_of_stops(rank: Rank) -> None:
    """In each round some ranks get a signal, at random times, while all run with random delays."""
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    chance, common = random.Random(rank.rank), random.Random(0)
    for number in range(rank["rounds"]):
        watching = rank.start()
        watching.signals.take()
        asking = common.sample(range(rank.world_size), common.randint(1, rank.world_size))
        timer = threading.Timer(chance.random() * 0.3, os.kill, [os.getpid(), signal.SIGTERM])
        in_step = common.random() < 0.5
        if rank.rank in asking:
            timer.start()
        step = first = common.choice([0, 1, 1000])
        while not watching.gate(step):
            if in_step:
                dist.all_reduce(torch.ones(1))
            time.sleep(chance.random() * 0.004)
            step += 1
        say("stop", [number, step - first])
        if rank.rank in asking:
            timer.join()
        watching.close()


def stop_behind_others(rank: Rank) -> None:
    """Rank 1 has ended its run and left when rank 0 gets a signal."""
    watching = rank.start()
    watching.signals.take()
    if rank.rank == 0:
        time.sleep(4.0)
        os.kill(os.getpid(), signal.SIGTERM)
        say("stops", [watching.gate(step) for step in range(3)])
    watching.close()


def epochs(rank: Rank) -> None:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)

    def body(rank: Rank, watching: Supervisor) -> None:
        for epoch, batches in enumerate(rank["batches"][rank.rank]):
            for batch in range(batches):
                watching.batches = batch + 1
                if rank["collectives"]:
                    dist.all_reduce(torch.ones(1))
            if rank["leaves"] == rank.rank and epoch == 1:
                return
            watching.end_of_epoch(epoch)
            watching.end_of_epoch(epoch)  # of no effect
            say("epoch", epoch)
            dist.barrier()  # lest a failure of the next one comes to a rank that is about to say so

    as_a_strategy_does(rank, body)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_and_close(rank: Rank) -> None:
    handlers = (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1))
    before = 0
    for number in range(3):
        watching = rank.start()
        watching.signals.take()
        watching.gate(number)
        if os.fork() == 0:
            watching.close()  # of no effect here
            say("child", (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == handlers)
            os._exit(0)
        os.wait()
        assert watching.close() is None
        assert watching.close() is None
        del watching
        before = before or descriptors()  # torch opens some for its first store
    say("same", (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == handlers)
    say("left", [thread.name for thread in threading.enumerate() if thread.name.startswith("smddp")])
    until = time.monotonic() + 5.0  # the store's server closes its end when it comes to it
    while descriptors() > before and time.monotonic() < until:
        time.sleep(0.05)
    say("descriptors", descriptors() - before)


def forked_worker(rank: Rank) -> None:
    """As a DataLoader's: SIGTERM to it ends it, and is no request to the job."""
    watching = rank.start()
    watching.signals.take()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    worker.start()
    time.sleep(0.2)
    worker.terminate()
    worker.join(5.0)
    time.sleep(0.5)
    say("seen", [worker.exitcode, watching.stop_signal])
    watching.close()


def upload(rank: Rank) -> None:
    """Rank ``fails`` is in a hook for ``seconds``; the others wait for its process in C, as in gloo, or follow it."""
    watching = rank.start()
    watching.signals.take()
    watching.shutdown.hooks_s = rank["allowed"]
    with open(rank.directory / "connection", "a") as connection:
        fails = rank["fails"] == rank.rank
        if fails:
            fcntl.flock(connection, fcntl.LOCK_EX)
        rank.store.add("connected", 1)
        while rank.store.add("connected", 0) < rank.world_size:
            time.sleep(0.01)
        if not fails and rank["follows"]:
            watching._wait(lambda: False, 20.0)
        elif not fails:
            fcntl.flock(connection, fcntl.LOCK_EX)
        error: Any = KeyError("the first cause")
        watching.explain(error)
        watching.shutdown.postpone(rank["allowed"])
        say("begun")
        if fails:
            time.sleep(rank["seconds"])
        say("uploaded")
        watching.await_first(rank["allowed"])
        watching.close()
        say("ended", time.time())
        raise error


def silent_store(rank: Rank) -> None:
    """It gives no answer for so long that it counts as lost, and then does answer."""
    watching = rank.start()
    board, answers, asked = watching._board, threading.Event(), []
    look = board.look

    def late() -> tuple[str, str, str]:
        answers.wait()
        board.tell = board.set_once = asked.append  # type: ignore[assignment]
        return look()

    board.look = late  # type: ignore[method-assign]
    while watching.failure is None:
        time.sleep(0.01)
    answers.set()
    say("kind", watching.failure.kind)
    watching.explain(watching.failure.error())
    watching.close()
    say("asked", len(asked))


def failure_behind_the_loss(rank: Rank) -> None:
    """A collective breaks when the store does, and who was first is known a moment later."""
    watching = rank.start()
    watching._lost = True
    first = Failure(1, "b", 2, 7, "data", "died", "it was killed")
    threading.Timer(0.4, watching._record, [first]).start()
    say("error", str(watching.explain(RuntimeError("Connection closed by peer"))))
    watching.close()
