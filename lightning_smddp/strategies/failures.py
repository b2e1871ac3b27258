"""Which rank failed first: the others only see that their connections to it broke."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_smddp._compat import default_store
from lightning_smddp.communication.errors import RankFailedError

_PATIENCE = timedelta(seconds=3)


@contextmanager
def shared_failures(key: str) -> Iterator[None]:
    """Within it an error is left for the others in the group's store under ``key``, the same on all ranks.

    Raises:
        RankFailedError: communication failed here, and another rank has left an error; it says which and what.
    """
    try:
        yield
    except Exception as error:
        if leave_failure(key, error):
            raise
        cause = _find(key)
        if cause is None:
            raise
        rank, _, text = cause.partition(" ")
        raise RankFailedError(int(rank), f"Rank {rank} failed while this rank waited for it: {text}") from error


def _is_of_communication(error: BaseException) -> bool:
    """Whether ``error`` may be the consequence of another rank's. Gloo's errors have no type of their own."""
    return isinstance(error, (dist.DistError, RankFailedError)) or (
        type(error) is RuntimeError and "gloo" in str(error)
    )


def leave_failure(key: str, error: BaseException) -> bool:
    """Let the others know of ``error``, unless it may be another rank's fault. Returns whether it is this rank's."""
    if _is_of_communication(error):
        return False
    if dist.is_initialized():
        # The store may have ended with the rank that served it.
        with suppress(RuntimeError, dist.DistError):
            default_store().set(key, f"{dist.get_rank()} {type(error).__name__}: {error}")
    return True


def _find(key: str) -> str | None:
    if not dist.is_initialized():
        return None
    store = default_store()
    try:
        store.wait([key], _PATIENCE)
        return bytes(store.get(key)).decode()
    except (RuntimeError, dist.DistError):  # nobody left one, or the store ended with the rank that served it
        return None
