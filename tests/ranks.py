"""Several ranks for one test: threads, processes, or processes that each hold a ``Trainer``; see README.md."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests import devices
from tests.rank_processes import GRACE_S, Rank, Setup, kill_session, start, watch


class RanksFailedError(RuntimeError):
    """Some ranks failed or hung.

    Attributes:
        tracebacks: Failed rank -> its traceback, or how its process ended. In order of failure,
            but the ranks whose process just ended come first: they are the likely cause.
        hung: Rank that was given up -> its stacks at that time.
    """

    def __init__(self, tracebacks: dict[int, str], hung: dict[int, str]) -> None:
        self.tracebacks, self.hung = tracebacks, hung
        lines = [f"ranks {list(tracebacks)} failed, in this order; ranks {sorted(hung)} hung"]
        lines += [f"---- rank {rank} failed:\n{text.rstrip()}" for rank, text in tracebacks.items()]
        lines += [f"---- rank {rank} hung in:\n{text.rstrip()}" for rank, text in hung.items()]
        super().__init__("\n".join(lines))


def run_in_threads(body: Callable[..., Any], world_size: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Run ``body(group, *args)`` once per rank, each rank a thread with its own gloo group over one store.

    Collectives need ``group=group``: there is no default group, so ``dist.send`` and DDP do not work here.

    Raises:
        RanksFailedError: from the first exception. The group of a failed rank is destroyed at once, so that
            ranks that wait for it in a collective fail too; a thread that hangs elsewhere is abandoned.
    """
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout))
    outcomes: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def rank_main(rank: int) -> None:
        try:
            group = _complete_group(store, rank, world_size, timedelta(seconds=timeout))
            outcomes.put((rank, body(group, *args), None))
        except BaseException as error:
            # Report first, so that no failure that this one causes comes before it. Then let go of the group,
            # which the frames hold too: that closes its connections.
            outcomes.put((rank, None, error))
            group = None
            traceback.clear_frames(error.__traceback__)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    hung: dict[int, str] = {}
    deadline = time.monotonic() + timeout + 1.0  # after the collectives' own timeout, whose error says more
    while len(results) + len(errors) + len(hung) < world_size:
        try:
            rank, result, error = outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            hung = {r: _thread_stack(threads[r]) for r in range(world_size) if r not in {*results, *errors}}
        else:
            if error is None:
                results[rank] = result
            else:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank, thread in enumerate(threads):
        if rank not in hung:
            thread.join()
    if not errors and not hung:
        return [results[rank] for rank in range(world_size)]
    tracebacks = {rank: "".join(traceback.format_exception(error)) for rank, error in errors.items()}
    raise RanksFailedError(tracebacks, hung) from next(iter(errors.values()), None)


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    node_ids: Sequence[str] | None = None,
    env: dict[str, str] | None = None,
    init: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``body(*args)`` once per rank, each rank a process in a session of its own.

    Args:
        body: A module-level function. Arguments and results must pickle; tensors travel by value.
        world_size: The number of ranks.
        args: Passed to every rank.
        timeout: Seconds within which every rank must have returned and exited.
        node_ids: One name per rank: ranks with equal names take each other for neighbours on one node.
        env: Environment variables on top of the test's own.
        init: Whether to initialise the default process group before ``body``.
        backend: The backend of that group.

    Raises:
        RanksFailedError: when a rank raised, died, left processes behind or hung. After the first failure the
            others have ``GRACE_S`` seconds to end. No process of a rank survives this call.
    """
    if node_ids is not None and len(node_ids) != world_size:
        raise ValueError(f"node_ids={list(node_ids)} for {world_size} ranks: give one name per rank")
    job = pickle.dumps((body, args))
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        try:
            for rank in range(world_size):
                setup = Setup(
                    directory=directory,
                    environment={**os.environ, **_rank_variables(rank, world_size, node_ids), **(env or {})},
                    warning_filters=list(warnings.filters),
                    node_id=None if node_ids is None else node_ids[rank],
                    backend=backend if init else None,
                    timeout=timeout,
                )
                ranks.append(start(rank, setup, job))
            tracebacks, hung = watch(ranks, timeout)
        finally:
            leftovers = [kill_session(rank.process) for rank in ranks]
    for number, processes in enumerate(leftovers):
        if processes and number not in hung:
            tracebacks.setdefault(number, "returned, but left behind: " + ", ".join(processes))
    if tracebacks or hung:
        raise RanksFailedError(tracebacks, hung)
    return [rank.result for rank in ranks]


def run_trainer_ranks(body: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run ``body(*args)`` once per rank, in the environment that torchrun provides.

    ``Trainer(accelerator="cpu", devices=d, num_nodes=n, strategy=...)`` works in ``body``: n is the number of
    distinct ``node_ids`` (1 without them), d the number of ranks of each. The parent serves the store, so
    that no port can be lost between its choice and its use. ``options`` are those of ``run_ranks`` except
    ``init``.
    """
    store = _served_store()
    env = {**trainer_environment(store.port), **options.pop("env", {})}
    try:
        return run_ranks(body, world_size, *args, env=env, init=False, **options)
    finally:
        del store  # closes its socket, also while a traceback holds this frame


def run_each(body: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    """Body of a rank: ``body`` for each case's arguments."""
    return [body(*case) for case in cases]


def _served_store() -> dist.TCPStore:
    """A store that listens on IPv4 alone.

    torch's own socket takes IPv6, too, and asks the DNS for the name of each client: 5 s where an answer is lost.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def trainer_environment(port: int) -> dict[str, str]:
    """What torchrun sets beside the ranks: a store that an agent (here: the parent) serves on ``port``."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _complete_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group that has all collectives: the bare backend lacks those that torch's dispatcher composes."""
    gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def _rank_variables(rank: int, world_size: int, node_ids: Sequence[str] | None) -> dict[str, str]:
    nodes = list(node_ids or ["node"] * world_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
        "GROUP_RANK": str(list(dict.fromkeys(nodes)).index(nodes[rank])),
        **devices.rank_environment(rank, nodes),
    }


def _thread_stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(it ended meanwhile)"
