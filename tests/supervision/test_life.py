"""Starting, epochs, and ends that are no failures."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_smddp.supervision.supervisor import Supervisor
from tests.programs import ROOT
from tests.supervision.jobs import Rank, run


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def handlers() -> tuple[object, int]:
    return signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)


def end_as(before: tuple[object, int]) -> None:
    sys.exit(handlers() != before)


def open_and_close(rank: Rank) -> list[str]:
    """What is not as it was."""
    rank.supervisor.stops.restore_signals()
    before, found = handlers(), []
    for number in range(3):
        watching = Supervisor(rank.store, rank.rank, rank.world_size, 60.0, 60.0)
        watching.stops.take_signals()
        watching.gate(number)
        child = multiprocessing.get_context("fork").Process(target=end_as, args=(before,))
        child.start()
        child.join()
        found += ["a child has other handlers"] * (child.exitcode != 0)
        child.close()
        assert watching.close() is None
        del watching
        if number == 0:
            opened = descriptors()  # torch opens some for its first store
    until = time.monotonic() + 5.0  # the store's server closes its end when it comes to it
    while descriptors() > opened and time.monotonic() < until:
        time.sleep(0.05)
    found += ["descriptors"] * (descriptors() > opened) + ["handlers"] * (handlers() != before)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("smddp")]
    return found + names[2:]  # this test's own supervisor has two


@pytest.mark.parametrize("world_size", [1, 3])
def test_supervisors_leave_nothing_behind(tmp_path: Path, world_size: int) -> None:
    ended = run(open_and_close, world_size, tmp_path)
    assert ended.results == [[]] * world_size
    assert ended.written == [""] * world_size  # T3


PROGRAM = """
import sys
import torch.distributed as dist
from lightning_smddp.supervision.supervisor import Supervisor

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
supervisor = Supervisor(store, rank, 2, 60.0, 60.0)
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_without_a_goodbye_does_not_abort() -> None:
    """T6: a thread that comes out of C++ behind the interpreter's end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store.port)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ends = [rank.communicate(timeout=60.0)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert ends == ["", ""]


def work(begun: Event) -> None:
    begun.set()
    time.sleep(30)


def forked_worker(rank: Rank) -> list[int | None]:
    """As a DataLoader's: SIGTERM to it ends it, and is no request to the job."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    worker = context.Process(target=work, args=(begun,))
    worker.start()
    begun.wait()
    worker.terminate()
    worker.join(5.0)
    time.sleep(0.5)
    return [worker.exitcode, rank.supervisor.own.signal]


def test_a_workers_sigterm_is_not_the_jobs(tmp_path: Path) -> None:
    """T5."""
    assert run(forked_worker, 1, tmp_path).results == [[-15, 0]]


def epochs(rank: Rank) -> None:
    """Each has fewer batches than the one before, and rank 1 leaves in the third one."""
    for epoch in range(3):
        for batch in range(6 - epoch):
            rank.supervisor.begin_batch(batch, batch + 1)
        if rank.rank == 1 and epoch == 2:
            return
        rank.supervisor.end_of_epoch(epoch)
        rank.supervisor.end_of_epoch(epoch)  # of no effect


def test_a_rank_that_ends_its_run_while_others_wait_for_it_has_left(tmp_path: Path) -> None:
    """Those before ended together."""
    ended = run(epochs, 2, tmp_path)
    assert "it ended epoch 2 after 4 batches, and rank 1 has begun 4 (" in ended.said(0)


def validates(rank: Rank) -> None:
    """Rank 0 is at the end of its epoch, and rank 1 waits for it in a validation in the middle of its own."""
    rank.supervisor.begin_batch(0, 1)
    if rank.rank == 1:
        rank.supervisor.own.begun += 1
        rank.supervisor.begin("validation")
        dist.barrier()
    rank.supervisor.end_of_epoch(0)


def test_a_rank_that_validates_in_the_middle_of_its_epoch_has_more_batches(tmp_path: Path) -> None:
    ended = run(validates, 2, tmp_path)
    assert "it ended epoch 0 after 1 batch, and rank 1 has begun 2 (validation)" in ended.said(0)


def last_hook(rank: Rank) -> None:
    """Rank 1 says goodbye and ends while rank 0, which looks at beats seldom, is in a long one."""
    if rank.rank == 1:
        time.sleep(1.0)
        rank.supervisor.close(0.0)
        (rank.directory / "gone").touch()
        return
    rank.supervisor._period = 10.0
    while not (rank.directory / "gone").exists():
        time.sleep(0.1)
    processes = rank.supervisor._board.who
    processes[1] = processes[1]._replace(start="")  # another one has its id
    time.sleep(1.5)


def test_a_rank_that_has_said_goodbye_may_end(tmp_path: Path) -> None:
    assert run(last_hook, 2, tmp_path).results == [None, None]


LOADER_OF_A_THREAD = """
import time
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader
from lightning_smddp.supervision.stop import Stops

stops = Stops()
stops.take_signals()
with ThreadPoolExecutor(1) as pool:
    batches = pool.submit(iter, DataLoader(range(9), num_workers=1, multiprocessing_context="fork")).result()
time.sleep(0.5)
print([int(batch) for batch in batches])
"""


def test_a_loaders_worker_outlives_the_thread_that_started_it() -> None:
    command = [sys.executable, "-c", LOADER_OF_A_THREAD]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60.0, check=False)
    assert ended.stdout == f"{[*range(9)]}\n", ended.stderr
