"""The rank processes behind ``tests.ranks``: starting, watching and killing them, and what runs in one."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import simulated_cuda
from tests.leaks import descendants

GRACE_S = 3.0  # what the other ranks get after the first failure
LEFTOVER_PATIENCE_S = 0.5  # what a finished rank's descendants get to end by themselves
# DDP's constructor imports torch._dynamo. None of these initialises CUDA, which would spoil the forked ranks.
PRELOAD = [
    "tests.uncollected",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "lightning.pytorch",
    "lightning_smddp.strategies.lightning",
    "pytest",
    "s3fs",  # a second of each rank with checkpoints: Lightning asks whether it is there
    "torch.utils.tensorboard",
    "torch.profiler._cupti_monitor",  # from here on: what Lightning and gloo import late
    "rich._emoji_codes",
    "encodings.idna",
    "tests.strategies.pipeline_learners",  # and with it what most bodies import
]
# Beside these where tests marked `slow` or `exhaustive` run, whose ranks need them: two seconds of the fork server.
PRELOAD_FOR_SLOW = [
    "torch._inductor.compile_fx",  # a second of each rank with DeepSpeed, which asks for torch.compile
    "sklearn.datasets",
    "transformers.models.gpt2.modeling_gpt2",
]
DUMP_SIGNAL = signal.SIGUSR2  # SIGUSR1 belongs to Lightning's SLURM requeueing


@dataclass(frozen=True)
class Setup:
    """What a rank does before its body."""

    directory: str
    environment: dict[str, str]
    warning_filters: list[Any]
    node_id: str | None
    backend: str | None
    timeout: float


@dataclass
class Rank:
    """The parent's view of a rank."""

    process: ForkServerProcess
    pipe: connection.Connection
    stacks: Path
    returned: bool = False
    result: Any = None
    failure: str | None = None  # a traceback, or how the process ended
    failed_at: float = 0.0  # 0: the process ended without an exception

    @property
    def reported(self) -> bool:
        return self.returned or self.failure is not None

    def receive(self) -> None:
        """Read the rank's message; a pipe that closed without one means that the process is dying."""
        try:
            message = self.pipe.recv_bytes()
        except EOFError:
            self.process.join(1.0)
            self.fail_by_ending()
            return
        self.returned, self.result, self.failure, self.failed_at = pickle.loads(message)

    def fail_by_ending(self) -> None:
        code = self.process.exitcode
        if code is None:
            ending = "closed its pipe"
        elif code >= 0:
            ending = f"exited with code {code}"
        else:
            ending = f"was killed by {signal.Signals(-code).name}"
        self.failure = f"the process {ending} {'after' if self.returned else 'before'} its body returned"


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start(number: int, setup: Setup, job: bytes) -> Rank:
    """Start a rank; it runs ``body(*args)`` of the pickled pair ``job``."""
    receiver, sender = _context().Pipe(duplex=False)
    stacks = Path(setup.directory, f"stacks-{number}")
    process = _context().Process(target=rank_main, args=(setup, job, sender, str(stacks)))
    process.start()
    sender.close()
    return Rank(process, receiver, stacks)


def forked(body: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process that runs ``body(*args)``, with torch and Lightning imported. It is the caller's to end."""
    process = _context().Process(target=_forked_main, args=(body, *args))
    process.start()
    return process


def warm_up() -> None:
    """Wait for the fork server's imports, which take minutes on a busy machine."""
    process = forked(int)
    process.join()
    process.close()


def watch(ranks: list[Rank], timeout: float) -> tuple[dict[int, str], dict[int, str]]:
    """Wait until every rank has exited; return the failed ranks' tracebacks and the hung ranks' stacks."""
    running = dict(enumerate(ranks))
    deadline = time.monotonic() + timeout
    while running and (left := deadline - time.monotonic()) > 0:
        pipes = [rank.pipe for rank in running.values() if not rank.reported]
        connection.wait([*pipes, *(rank.process.sentinel for rank in running.values())], left)
        for number, rank in list(running.items()):
            exited = not rank.process.is_alive()  # asked first: then all that it sent is in the pipe
            if not rank.reported and rank.pipe.poll():
                rank.receive()
            elif exited and not rank.reported:  # a descendant holds the pipe open
                rank.fail_by_ending()
            if exited:
                del running[number]
                if rank.failure is None and rank.process.exitcode:
                    rank.fail_by_ending()
            if rank.failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    failed = sorted((rank.failed_at, number) for number, rank in enumerate(ranks) if rank.failure is not None)
    return {number: str(ranks[number].failure) for _, number in failed}, _stacks(running)


def _stacks(hung: dict[int, Rank]) -> dict[int, str]:
    for rank in hung.values():
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, DUMP_SIGNAL)
    if hung:
        time.sleep(0.3)
    return {number: _stack(rank) for number, rank in hung.items()}


def _stack(rank: Rank) -> str:
    if not rank.stacks.exists():
        return "(it had not started)"
    note = "(after its body returned)\n" if rank.returned else ""
    return note + rank.stacks.read_text()


def kill_session(process: ForkServerProcess) -> list[str]:
    """Kill a rank and what it started; return what had outlived it."""
    pid = process.pid
    outlived: list[str] = []
    if not process.is_alive():
        deadline = time.monotonic() + LEFTOVER_PATIENCE_S
        while (members := [p for p in descendants() if p.session == pid]) and time.monotonic() < deadline:
            time.sleep(0.02)
        outlived = [str(member) for member in members]
    while alive := [p.pid for p in descendants() if p.session == pid]:
        for member in alive:
            _kill(member)
        time.sleep(0.005)
    process.kill()  # in case it had no session yet
    process.join()
    process.close()
    return outlived


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ---- in the rank ----


def _forked_main(body: Callable[..., None], *args: Any) -> None:
    _collect_what_is_new()
    body(*args)


def _collect_what_is_new() -> None:
    """Undo ``tests.uncollected``. What is imported stays: to look at it again takes each collection 0.4 s."""
    gc.freeze()
    gc.enable()


def rank_main(setup: Setup, job: bytes, pipe: connection.Connection, stacks: str) -> None:
    """Run the body and send what it returned or raised."""
    os.setsid()
    _collect_what_is_new()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    stack_file = os.open(stacks, os.O_WRONLY | os.O_CREAT)  # never closed: a rank may hang in its very exit
    faulthandler.enable(stack_file)
    faulthandler.register(DUMP_SIGNAL, stack_file)  # until Lightning resets handlers at the end of a run
    faulthandler.dump_traceback_later(max(setup.timeout - 0.5, 0.1), file=stack_file)
    os.environ.clear()
    os.environ.update(setup.environment)
    warnings.resetwarnings()
    warnings.filters.extend(setup.warning_filters)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    try:
        message = _dumps((True, _run(setup, job), None, 0.0))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, None, traceback.format_exc(), time.monotonic())))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # without tear-down: that could wait for the other ranks
    pipe.send_bytes(message)
    pipe.close()


class _OnHost(pickle.Pickler):
    """Takes CUDA tensors along as CPU tensors: they do not travel between processes by value."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.detach().cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _dumps(message: Any) -> bytes:
    buffer = io.BytesIO()
    _OnHost(buffer).dump(message)
    return buffer.getvalue()


def _die_with_parent() -> None:
    """Kill this rank and what it started when the test session is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _run(setup: Setup, job: bytes) -> Any:
    if simulated_cuda.wanted():
        simulated_cuda.install(int(os.environ["LOCAL_WORLD_SIZE"]))
    if setup.node_id is not None:
        from lightning_smddp.communication import topology

        topology.node_identity = lambda: setup.node_id
    if setup.backend is not None:
        dist.init_process_group(
            setup.backend,
            init_method=f"file://{setup.directory}/rendezvous",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=setup.timeout),
        )
        dist.barrier()  # who left before another rank has connected to it would make that one fail
    body, args = pickle.loads(job)
    result = body(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
