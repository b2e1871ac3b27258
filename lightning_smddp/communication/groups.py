"""Process groups among some ranks of the job, ready for use: nobody else takes part, and no step has to wait for them.

NCCL makes a communicator at a group's first use, with all members waiting for each other on the host. In the middle of
a step they may never come there: one waits for a message that another one sends behind it. So every communicator is
made when its group is, by those who use it, in an order that all ranks share.
"""

from __future__ import annotations

import faulthandler
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_smddp._compat.torch import abort_and_forget, abort_nccl, default_store, is_nccl, new_group_among
from lightning_smddp.communication.objects import RankTimeoutError, broadcast

_NCCL_MARGIN = timedelta(seconds=60)  # for the supervision to find out who is late
_aborted = False  # after a failure: this process's groups are not used again
_old_stores: list[dist.Store] = []  # kept, as the ranks of a new start meet in them


def backend_timeout(timeout: timedelta, of_nccl: bool) -> timedelta:
    """The timeout of a group of which each collective is to end within ``timeout``.

    NCCL's ends the process that waits by SIGABRT, without a word of who is late. The supervision comes before it.
    """
    return timeout + _NCCL_MARGIN if of_nccl else timeout


def world() -> dist.ProcessGroup:
    """All ranks of the job, which are connected."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def new_name(group: dist.ProcessGroup) -> str:
    """A name for groups of ranks of ``group`` that no group had before. Collective over ``group``."""
    return f"lightning_smddp-{broadcast(secrets.token_hex(8), group)}"


def create_group(
    ranks: list[int],
    name: str,
    timeout: timedelta,
    device: torch.device,
    by_pairs: bool = False,
) -> dist.ProcessGroup:
    """A group of the global ``ranks``, with its communicator. Collective over them alone.

    A rank that is in several groups has to create them in an order that is the same on all ranks.

    Args:
        ranks: its members, of which this rank is one.
        name: the same on all of them, and new.
        timeout: of its collectives.
        device: where its messages are.
        by_pairs: for point-to-point messages, each pair of ranks is to have a communicator of its own, and so a
            stream: else a send has to wait for a receive from another rank that was asked for before. NCCL makes
            those by the first message of a pair: :func:`connect_pairs`.

    Raises:
        RankTimeoutError: a member did not come within ``timeout``.
    """
    if device.type == "cpu":
        return new_group_among(ranks, name, timeout)
    # In the store, as NCCL would wait for members without a limit.
    store = default_store()
    store.set(f"{name}/member {dist.get_rank()}", "")
    for rank in ranks:
        try:
            store.wait([f"{name}/member {rank}"], timeout)
        except RuntimeError:
            text = f"Rank {rank} did not come within {timeout.total_seconds():g} s to make the communicator of {ranks}."
            raise RankTimeoutError(rank, text) from None
    # Without the default group's gloo, as messages are of the device.
    backend = "nccl" if is_nccl() else None
    bound_device = None if by_pairs else device
    group = new_group_among(ranks, name, backend_timeout(timeout, is_nccl()), bound_device, backend)
    # NCCL makes the communicator in the first collective. Here all members are on their way to it; in mid-step another
    # group could come first on one of them.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def connect_pairs(group: dist.ProcessGroup, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Open the connections between these ranks of ``group``. Collective over it, with the same ``pairs`` everywhere.

    NCCL makes a communicator for each pair then, if the group is one ``by_pairs``.
    """
    token = torch.zeros(1, device=device)
    # Pairs in one order everywhere: of the first one that is not open yet, both ranks come to it next.
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
        if group.rank() == low:
            dist.send(token, group=group, group_dst=high)
        elif group.rank() == high:
            dist.recv(token, group=group, group_src=low)


# ---- the end ----


def abort_groups() -> None:
    """After a failure: whoever waits for NCCL, on the host or on a device, is set free, and gets an error. Any thread.

    Nothing on other backends, whose collectives fail by themselves when a peer has gone.
    """
    if dist.is_initialized():
        abort_nccl()


def mark_groups_aborted() -> None:
    """The job has failed, as all ranks agree: some of them have aborted NCCL's groups, and nobody uses them again."""
    global _aborted
    _aborted = dist.is_initialized() and is_nccl()


def forget_aborted_groups() -> None:
    """Before a new start in the same processes: groups of a failed job are no more. Its store stays, to meet there."""
    global _aborted
    if _aborted and dist.is_initialized():
        _old_stores.append(default_store())
        abort_and_forget()
    _aborted = False


def close_group(group: dist.ProcessGroup) -> None:
    """Let go of a group, if it has not gone with the default group. Waits for its messages, but not after a failure."""
    with suppress(ValueError):
        if _aborted:
            abort_and_forget(group)
        else:
            dist.destroy_process_group(group)


def close_all(failed: bool) -> None:
    """Let go of all groups at the end of the process.

    After a failure without waiting, as what NCCL has launched may never end.
    """
    if dist.is_initialized() and is_nccl() and (failed or _aborted):
        abort_and_forget()
    elif dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """What is done here ends in time, or the process does, with exit code 1 and what each thread was doing."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # `sys.stderr` may be replaced
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
