"""Tensors between ranks, of any shape, dtype and device, and structures that hold some: bit by bit, never pickled.

And the norm of tensors of which each rank has some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightning_smddp.communication.objects import broadcast, gather, pickled, unpickled

MESSAGE_BYTES = 4 * 2**20  # of small tensors together, or of some rows of a large one
CPU = torch.device("cpu")


def from_numbers(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.tensor(values)``, which on a device would wait until all that was queued before is done."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def broadcast_tensors(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, group_src: int, device: torch.device
) -> None:
    """Write the ``tensors`` of rank ``group_src`` of ``group`` into everyone's, in place. Collective.

    Args:
        tensors: of the same shapes and dtypes on all ranks, anywhere in memory; on the meta device where a rank takes
            part but does not want one.
        group: the ranks.
        group_src: rank in ``group``.
        device: where ``group``'s backend has its messages. Small tensors travel together, and what is on ``device`` is
            sent from where it is.
    """
    is_source = group.rank() == group_src
    for message in _messages(tensors):
        only = message[0]
        if len(message) == 1 and only.device == device and only.is_contiguous():
            dist.broadcast(only.view(-1).view(torch.uint8), group=group, group_src=group_src)
            continue
        flat = torch.empty(sum(tensor.nbytes for tensor in message), dtype=torch.uint8, device=device)
        parts = flat.split([tensor.nbytes for tensor in message])
        views = [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, message, strict=True)]
        if is_source:
            _copy(message, views)
        dist.broadcast(flat, group=group, group_src=group_src)
        if not is_source:
            _copy(views, message)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if not target.is_meta:
            target.copy_(source)


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors that have elements, detached, in parts of ``MESSAGE_BYTES`` or of one larger row.

    Those with the largest elements come first, so that each begins at a multiple of its elements' size.
    """
    message: list[Tensor] = []
    room = MESSAGE_BYTES
    parts = chain.from_iterable(map(_rows, tensors))
    for tensor in sorted(parts, key=lambda tensor: tensor.itemsize, reverse=True):
        if message and tensor.nbytes > room:
            yield message
            message, room = [], MESSAGE_BYTES
        if tensor.numel():
            message.append(tensor)
            room -= tensor.nbytes
    if message:
        yield message


def _rows(tensor: Tensor) -> Sequence[Tensor]:
    """``tensor``, in parts of its first dimension where it is large: each takes as much memory again for a while."""
    parts = [tensor.detach()]
    if tensor.nbytes > MESSAGE_BYTES and tensor.dim() > 0:
        parts = parts[0].split(max(1, MESSAGE_BYTES * len(tensor) // tensor.nbytes))
    return parts


def broadcast_structure(value: Any, group: dist.ProcessGroup, group_src: int, device: torch.device) -> Any:
    """The ``value`` of rank ``group_src`` of ``group``, on every rank; there it is ``value`` itself. Collective.

    Large tensors in it travel as such, the rest is pickled. Those of a device arrive on ``device``.

    Raises:
        UnsendableError: on every rank.
    """
    is_source = group.rank() == group_src
    apart: list[Tensor] = []
    data = pickled(value, apart) if is_source else None
    data, specs = broadcast((data, [(tensor.shape, tensor.dtype, tensor.is_cpu) for tensor in apart]), group, group_src)
    if not is_source:
        for shape, dtype, is_on_host in specs:
            apart.append(torch.empty(shape, dtype=dtype, device=CPU if is_on_host else device))
    broadcast_tensors(apart, group, group_src, device)
    received = unpickled(data, apart)
    return value if is_source else received


def gather_structures(value: Any, group: dist.ProcessGroup, to_all: bool, device: torch.device) -> Iterator[Any]:
    """Every rank's ``value``, one rank's after the other. Collective: to be gone through to its end.

    Args:
        value: of this rank.
        group: the ranks.
        to_all: False: the first rank alone gets any.
        device: where ``group``'s backend has its messages.

    Yields:
        Values with large tensors on the CPU: this rank's own that are there, and copies of all others.

    Raises:
        UnsendableError: on every rank.
    """
    own: list[Tensor] = []
    data = pickled(value, own)
    announced = gather((data, [(tensor.shape, tensor.dtype) for tensor in own]), group)
    is_wanted = to_all or group.rank() == 0
    for data, _ in announced:
        if isinstance(data, str):
            unpickled(data)
    for source, (data, specs) in enumerate(announced):
        tensors = own
        if source != group.rank():
            place = "cpu" if is_wanted else "meta"
            tensors = [torch.empty(shape, dtype=dtype, device=place) for shape, dtype in specs]
        broadcast_tensors(tensors, group, source, device)
        if is_wanted:
            yield unpickled(data, [tensor.cpu() for tensor in tensors])


def norm_over_ranks(
    gradients: Sequence[Tensor],
    group: dist.ProcessGroup,
    norm_type: float,
    device: torch.device,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """The norm of the gradients of all ranks together, as ``torch.nn.utils.get_total_norm`` of one. Collective.

    Args:
        gradients: of this rank; no other one has the same.
        group: the ranks.
        norm_type: p of the norm, positive or ``inf``.
        device: of the gradients.
        error_if_nonfinite: raise ``RuntimeError`` on every rank if the norm is inf or nan.

    Returns:
        A scalar in fp32, the same on every rank.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} has to be positive, or inf.")
    # The norm of all is that of the ranks' norms: in fp64, as the squares of large ones overflow fp32.
    norm = get_total_norm(gradients, norm_type).to(device=device, dtype=torch.float64, non_blocking=True)
    norms = norm.new_empty(group.size())
    dist.all_gather_single(norms, norm.view(1), group)
    total: Tensor = torch.linalg.vector_norm(norms, norm_type).float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of all ranks' gradients is {float(total)}, so they cannot be "
            "clipped. Set error_if_nonfinite=False to scale by it anyway."
        )
    return total
