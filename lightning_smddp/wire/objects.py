"""Python's objects between the ranks of a group, pickled, by torch's object collectives.

Nothing large, and no tensor of a device: pickled it comes back on the sender's index. Those go by ``wire/stream.py``.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed as dist


class UnsendableError(ValueError):
    """A value of some rank cannot be pickled. Raised on every rank."""


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's ``value``, in rank order, on every rank. Collective.

    Raises:
        UnsendableError: on every rank.
    """
    pickled: list[Any] = [None] * group.size()
    dist.all_gather_object(pickled, _pickled(value), group=group)
    return [_unpickled(data) for data in pickled]


def broadcast(value: Any, group: dist.ProcessGroup, source: int = 0) -> Any:
    """The ``value`` of the rank ``source`` of ``group``, on every rank. Collective.

    Raises:
        UnsendableError: on every rank.
    """
    is_source = group.rank() == source
    sent = [_pickled(value) if is_source else None]
    dist.broadcast_object_list(sent, group=group, group_src=source)
    received = _unpickled(sent[0])
    return value if is_source else received


def _pickled(value: Any) -> bytes | str:
    """``value``, or why it cannot be sent: so that the other ranks do not wait for it."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever pickling an object of the user's raises
        return f"{type(error).__name__}: {error}"


def _unpickled(data: bytes | str | None) -> Any:
    if not isinstance(data, bytes):
        raise UnsendableError(f"It cannot be sent to other ranks: {data}")
    return pickle.loads(data)
