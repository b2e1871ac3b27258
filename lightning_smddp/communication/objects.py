"""Python's objects between ranks, pickled, by torch's object collectives. Ranks of a job trust each other.

They go by the group's gloo where it has one, else by its device. Small tensors may be in them: those of a device arrive
on the receiver's current one. Large ones go by ``wire/stream.py``: pickled, they are copied four times.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.wire.pytree import map_leaves


class UnsendableError(ValueError):
    """A value of some rank cannot be pickled. Raised on every rank."""


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, in rank order, on every rank. Collective.

    Args:
        value: what pickle takes.
        group: None: all ranks of the job, or this process alone where it is in none.

    Raises:
        UnsendableError: on every rank.
    """
    group = group or dist.group.WORLD
    if group is None:
        return [value]
    pickled: list[Any] = [None] * group.size()
    dist.all_gather_object(pickled, _pickled(value), group=group)
    return [_unpickled(data) for data in pickled]


def broadcast(value: Any, group: dist.ProcessGroup | None = None, group_src: int = 0) -> Any:
    """The ``value`` of the rank ``group_src`` of ``group``, on every rank; there it is ``value`` itself. Collective.

    Args:
        value: what pickle takes; ignored on other ranks.
        group: as in :func:`gather`.
        group_src: rank in ``group``.

    Raises:
        UnsendableError: on every rank.
    """
    group = group or dist.group.WORLD
    if group is None:
        return value
    is_source = group.rank() == group_src
    sent = [_pickled(value) if is_source else None]
    dist.broadcast_object_list(sent, group=group, group_src=group_src)
    received = _unpickled(sent[0])
    return value if is_source else received


def each(act: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Call ``act`` on every rank; what it returns, in rank order, on every rank. Collective.

    Whoever fails still takes part in the exchange: the others wait in it, and hear why.

    Raises:
        Exception: on every rank, if ``act`` failed on any: its own error where it failed; elsewhere that of the first
            rank that failed, or a :class:`RankFailedError` with its text if it cannot be pickled.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as caught:
        error = caught
    outcomes = gather((result, _sendable(error)), group)
    failures = [failure for _, failure in outcomes if failure is not None]
    if not failures:
        return [returned for returned, _ in outcomes]
    try:
        raise error or failures[0]
    finally:
        del error, failures, outcomes  # which this frame would keep alive, and they this frame


def first(act: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Call ``act`` on the first rank alone; what it returns, on all. Collective, and fails as :func:`each`."""
    group = group or dist.group.WORLD
    is_first = group is None or group.rank() == 0
    return each(act if is_first else lambda: None, group)[0]


def to_cpu(value: Any) -> Any:
    """A copy of the structure ``value`` with its tensors on the CPU: those that are there, and copies of others."""
    return map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, value)


def _sendable(error: Exception | None) -> Exception | None:
    """``error``, or one in its place that other ranks can read."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # whatever its class makes of its arguments
        rank = dist.get_rank() if dist.is_initialized() else 0
        return RankFailedError(rank, f"Rank {rank} failed: {type(error).__name__}: {error}")


class _Pickler(pickle.Pickler):
    """Without it, a tensor of a device comes back on the sender's index."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type in ("cpu", "meta"):
            return NotImplemented
        return _to_current, (value.detach().cpu(), value.device.type, value.requires_grad)


def _to_current(tensor: Tensor, kind: str, requires_grad: bool) -> Tensor:
    return tensor.to(kind).requires_grad_(requires_grad)


def _pickled(value: Any) -> bytes | str:
    """``value``, or why it cannot be sent: so that the other ranks do not wait for it."""
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
        return buffer.getvalue()
    except Exception as error:  # whatever pickling an object of the user's raises
        return f"{type(error).__name__}: {error}"


def _unpickled(data: bytes | str | None) -> Any:
    if not isinstance(data, bytes):
        raise UnsendableError(f"It cannot be sent to other ranks: {data}")
    return pickle.loads(data)
