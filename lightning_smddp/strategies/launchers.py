"""``launch`` of Lightning's two launchers, with what a job needs so that its processes end together, and say why.

It is an attribute of each launcher (``strategies/base.py``), which stays Lightning's in all else.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.multiprocessing import ProcessExitedException

from lightning_smddp._compat.trainer import is_control_flow, set_num_threads_if_needed
from lightning_smddp.communication.rendezvous import JOB
from lightning_smddp.launchers.launch import processors
from lightning_smddp.launchers.mpi import started_by_mpirun
from lightning_smddp.wording import counted

# popen:        this script is local rank 0, and starts itself again for ranks 1, 2, ...   (`launch_script`)
# torchrun ...: every rank is there already, and starts nothing                            (`launch_script`)
# spawn, fork:  this process is no rank, and starts ranks 0, 1, ...                        (`launch_ranks`)
LAUNCHER_PID = "LIGHTNING_SMDDP_LAUNCHER_PID"  # set for ranks that a script's first process starts
_POLL_S = 0.1
_LINGER_S = 8.0  # how long the other ranks may take to end after the first one has failed
_STOPS = (signal.SIGTERM, signal.SIGINT)


def launcher_pid() -> int | None:
    """The process without which this rank must not go on: launcher, torchrun's agent, mpirun; None if there is none."""
    parent = os.getppid()
    started_by_script = os.environ.get(LAUNCHER_PID) == str(parent)
    return parent if started_by_script or may_be_ended() else None


def may_be_ended() -> bool:
    """Whether torchrun, mpirun or ``multiprocessing`` started this rank: they end all as soon as one has failed."""
    if "TORCHELASTIC_RUN_ID" in os.environ or started_by_mpirun(os.environ):
        return True
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _on_one_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In a fork of a process that has computed on several threads, OpenMP would wait for threads that are not there."""
    torch.set_num_threads(1)
    return function(*args, **kwargs)


def _say_start(ranks: int) -> None:
    """Ranks import what the script does before they are heard of."""
    shared = processors()
    note = f" They share {counted(shared, 'processor')}: on CPU use devices={shared}." if ranks > shared else ""
    if ranks > 1:
        rank_zero_info(f"Starting {counted(ranks, 'process')}.{note}")


def launch_script(launcher: Any, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
    """Start the other ranks, and run ``function`` in this one; if it fails, they end before this process does.

    ``launch`` of the launcher that starts the script again for each other rank, or finds ranks that are there already.
    """
    environment = launcher.cluster_environment
    environment.validate_settings(num_devices=launcher.num_processes, num_nodes=launcher.num_nodes)
    if not environment.creates_processes_externally:
        _say_start(launcher.num_processes)
        os.environ[LAUNCHER_PID] = str(os.getpid())  # for the ranks alone, which inherit it
        if launcher.num_nodes == 1:
            os.environ.setdefault(JOB, str(os.getpid()))
        try:
            launcher._call_children_scripts()
        finally:
            del os.environ[LAUNCHER_PID]
    set_num_threads_if_needed(launcher)
    # Until all ranks have met, nobody but this process can see that one has died: a thread looks at them. From then on
    # it is the supervision that does, which is made when they have.
    atexit.unregister(end_processes)  # of a run before this one
    supervision, is_over = trainer.strategy._supervision, threading.Event()

    def has_joined() -> bool:
        return is_over.is_set() or supervision.supervisor is not None

    if launcher.procs:
        threading.Thread(target=_watch_start, args=(has_joined, launcher.procs), daemon=True).start()
    try:
        return supervision.run(function, *args, **kwargs)
    except BaseException as error:
        # The script may catch the error and go on. Only when it ends do the ranks that this process has started have to
        # end, which have their own ways to say why, and hooks to run.
        if not is_control_flow(error):
            patience_s = max(_LINGER_S, supervision.hooks_after_exception_s(trainer))
            atexit.register(end_processes, launcher.procs, patience_s)
        raise
    finally:
        is_over.set()


def launch_ranks(launcher: Any, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
    """Run ``function`` in each rank; signals to this process go to the ranks.

    ``launch`` of the launcher that starts ranks by ``multiprocessing``, and is no rank itself.
    """
    _say_start(trainer.strategy.num_processes)
    received: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for process in launcher.procs:
            if process.is_alive():
                os.kill(process.pid, signum)

    run: Any = partial(trainer.strategy._supervision.run, function)
    if launcher.is_interactive_compatible:  # it forks
        run = partial(_on_one_thread, run)
    with _handled_by(pass_on):
        try:
            return type(launcher).launch(launcher, run, *args, trainer=trainer, **kwargs)
        except ProcessExitedException as error:
            # A rank that ends by a signal that was passed on has the exit code of a stop, and so has this process.
            if received and error.exit_code == 128 + received[0]:
                sys.exit(error.exit_code)
            raise


def end_processes(processes: list[subprocess.Popen[bytes]], patience_s: float = _LINGER_S) -> None:
    """Give ``processes`` some seconds to end by themselves, then kill those that have not, as a stopped one."""
    deadline = time.monotonic() + patience_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _watch_start(has_joined: Callable[[], bool], processes: list[subprocess.Popen[bytes]]) -> None:
    """End the job if a rank ends before it could join the others, who would wait for it."""
    while not has_joined():
        time.sleep(_POLL_S)
        for index, process in enumerate(processes):
            code = process.poll()
            if code is not None and not has_joined():
                line = (
                    f"lightning-smddp: local rank {index + 1} (process {process.pid}) ended with exit code {code} "
                    "before it joined the other ranks. Its own output says why.\n"
                )
                # The training thread waits for all ranks in C++, so this one ends the process by force.
                os.write(2, line.encode())
                end_processes(processes, patience_s=0.0)
                os._exit(1)


@contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGTERM and SIGINT go to ``handle``, and do not end this process before its ranks."""
    previous = {}
    # Python lets the main thread alone set handlers. A signal that is ignored, as by `nohup`, stays ignored.
    if threading.current_thread() is threading.main_thread():
        for signum in _STOPS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                previous[signum] = signal.signal(signum, handle)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
