"""Python's objects between ranks, pickled, by torch's object collectives; and the errors that name a rank.

Ranks of a job trust each other. Objects go by the group's gloo where it has one, else by its device; large tensors by
``communication/tensors.py``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_smddp.pytree import map_tensors

_SMALL = 1024  # bytes of a tensor that is pickled even where others go apart


class RankFailedError(RuntimeError):
    """A peer ended or left while this rank waited for it. ``rank`` is the peer's global rank."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, str(self))  # so that it can travel between processes


class RankTimeoutError(RankFailedError):
    """A peer is alive but did not come within the collective timeout."""


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
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, pickled(value), group=group)
    return [unpickled(data) for data in gathered]


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
    sent: list[Any] = [pickled(value) if is_source else None]
    dist.broadcast_object_list(sent, group=group, group_src=group_src)
    received = unpickled(sent[0])
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
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def pickled(value: Any, apart: list[Tensor] | None = None) -> bytes | str:
    """``value``, or why it cannot be sent: told to the other ranks, as these wait for it.

    Tensors are pickled as their elements; those of a device arrive on the receiver's current one.

    Args:
        value: anything.
        apart: is filled with the tensors of devices and the large ones of the host, which then are not pickled.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, apart).dump(value)
    except Exception as error:  # whatever pickling an object of the user's raises
        return f"{type(error).__name__}: {error}"
    return file.getvalue()


def unpickled(data: bytes | str, apart: Sequence[Tensor] = ()) -> Any:
    """The value, with the tensors ``apart`` in it; raises :class:`UnsendableError` if it could not be sent."""
    if isinstance(data, str):
        raise UnsendableError(f"It cannot be sent to other ranks: {data}")
    return _Unpickler(data, apart).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, apart: list[Tensor] | None) -> None:
        super().__init__(file)
        self._apart = apart

    @override
    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_meta or obj.is_quantized:
            return None
        tensor, needs_gradient = obj.detach(), obj.requires_grad and obj.is_leaf  # what has a graph leaves it behind
        if self._apart is not None and not (tensor.is_cpu and tensor.nbytes <= _SMALL):
            self._apart.append(tensor)
            return needs_gradient, len(self._apart) - 1
        elements = tensor.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
        return needs_gradient, tensor.device.type, tensor.dtype, tuple(tensor.shape), elements.view(torch.uint8).numpy()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, apart: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._apart = apart

    @override
    def persistent_load(self, pid: Any) -> Any:
        needs_gradient, *content = pid
        if len(content) == 1:
            return self._apart[content[0]].requires_grad_(needs_gradient)
        kind, dtype, shape, elements = content
        return torch.from_numpy(elements).view(dtype).view(shape).to(kind).requires_grad_(needs_gradient)


def _sendable(error: Exception | None) -> Exception | None:
    """``error``, or one in its place that other ranks can read."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # whatever its class makes of its arguments
        rank = dist.get_rank() if dist.is_initialized() else 0
        return RankFailedError(rank, f"Rank {rank} failed: {type(error).__name__}: {error}")
