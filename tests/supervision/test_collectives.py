"""Real collectives: what gloo's errors are explained by, and signals that come while a rank sits in C++ code."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_smddp._compat.torch import default_store, set_group_timeout
from lightning_smddp.supervision import Supervisor, WatchOptions
from tests.ranks import RanksFailedError, run_ranks


def start(collective_timeout: float = 30.0, stop_grace: float = 30.0) -> Supervisor:
    rank, size = dist.get_rank(), dist.get_world_size()
    options = WatchOptions(rank, size, collective_timeout, host="here", stop_grace=stop_grace, grace=1.0)
    return Supervisor.start(default_store(), options)


def train(kind: str) -> None:
    supervisor = start()
    try:
        for step in range(20):
            supervisor.progress.step, supervisor.progress.phase = step, "backward"
            if step == 7 and dist.get_rank() == 1:
                if kind == "raise":
                    raise IndexError("bad sample 3")
                if os.fork() == 0:  # as a DataLoader worker: it holds all sockets of gloo, and none of ours
                    time.sleep(20)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1000))
    except BaseException as error:
        explained = supervisor.explain(error)
        supervisor.close()
        if explained is not error:
            raise explained from error
        raise


def test_an_exception_explains_the_errors_of_the_others_collectives() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(train, 3, "raise")
    for rank in (0, 2):
        last = caught.value.tracebacks[rank].strip().splitlines()[-1]
        assert last.startswith("lightning_smddp.communication.errors.RankFailedError: Rank 1 (host here, process ")
        assert last.endswith(") failed at step 7 (backward): IndexError: bad sample 3")
    assert caught.value.tracebacks[1].strip().endswith("IndexError: bad sample 3")


@pytest.mark.slow
def test_a_killed_rank_is_named_though_its_workers_hold_its_sockets() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(train, 2, "kill")
    # Gloo notices nothing, as the child holds the sockets: the process is ended with one line on stderr.
    assert "exited with code 1 " in caught.value.tracebacks[0]


def time_out() -> str:
    supervisor = start()
    set_group_timeout(timedelta(seconds=1))
    supervisor.progress.step = 4
    supervisor.progress.phase = "data" if dist.get_rank() == 1 else "backward"
    message = ""
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            message = str(supervisor.explain(error))
    else:
        deadline = time.monotonic() + 20
        while supervisor.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
    supervisor.close()
    return message


@pytest.mark.slow
def test_a_collective_that_times_out_names_the_late_rank() -> None:
    message = run_ranks(time_out, 2)[0]
    assert ") did not come at step 4 (data): rank 0 (host here) waited for it at step 4 (backward): " in message
    assert "imed out" in message


def wait_for_a_stopped_peer() -> None:
    supervisor = start(stop_grace=2.0)
    supervisor.install_signals()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_sigterm_is_heard_inside_a_collective_with_a_stopped_peer() -> None:
    start_time = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(wait_for_a_stopped_peer, 2)
    assert time.monotonic() - start_time < 20
    assert "exited with code 143" in caught.value.tracebacks[0]
    assert "was killed by SIGKILL" in caught.value.tracebacks[1]
