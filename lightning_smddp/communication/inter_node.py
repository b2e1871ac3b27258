"""Sums between nodes: how one shard, already summed inside each node, is summed over the nodes.

``start(shard, layout)`` begins the exchange and returns the function that completes it; between the two the caller may
start others. ``start`` and completion may run in different threads, each in the same order on every rank, so the
two phases use a process group each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat.torch import all_gather_single
from lightning_smddp.communication.buckets import Layout
from lightning_smddp.communication.compression import Codec, ErrorFeedback

Finish = Callable[[], object]

_ENCODED_AT_ONCE = 2**18  # elements that are encoded at a time, while the ones before are on the wire


class InterNodeReduce(Protocol):
    """Sums a tensor over a group, in place."""

    def start(self, shard: Tensor, layout: Layout) -> Finish:
        """Begin the sum of ``shard``; the returned function waits and leaves the sum in ``shard``.

        ``layout`` says what the shard consists of, for what is remembered from step to step (error feedback).
        """
        ...

    def wire_bytes(self, numel: int, dtype: torch.dtype, layout: Layout | None = None) -> int:
        """Bytes that this rank sends to other ranks for a shard of ``numel`` elements."""
        ...


def _worthwhile(codec: Codec | None, dtype: torch.dtype) -> Codec | None:
    """``codec`` if it makes values of ``dtype`` smaller, else None: what would only round is left out."""
    if codec is None or codec.bytes_per_element(dtype) >= dtype.itemsize:
        return None
    return codec


def _bytes_per_element(codec: Codec | None, dtype: torch.dtype) -> float:
    """On the wire, of values of ``dtype``."""
    if codec is None:
        return dtype.itemsize
    return codec.bytes_per_element(dtype)


class RingExchange:
    """The backend's own all-reduce (a ring on gloo), of the values as they are or as ``codec`` (a cast) rounds them.

    The ring also rounds the sums on its way, which error feedback does not see.
    """

    def __init__(self, group: dist.ProcessGroup, codec: Codec | None = None, feedback: ErrorFeedback | None = None):
        self.group, self.codec, self.feedback = group, codec, feedback

    def start(self, shard: Tensor, layout: Layout) -> Finish:
        """See :meth:`InterNodeReduce.start`."""
        codec, feedback = _worthwhile(self.codec, shard.dtype), self.feedback
        if codec is None:
            work = dist.all_reduce(shard, group=self.group, async_op=True)
            assert work is not None
            return lambda: work.wait()
        if feedback is not None:
            # The order matters: what was lost before goes into the values that are encoded, and what is lost now is the
            # difference of those and of what the wire carries. Nothing is lost for good.
            feedback.add_to(shard, layout)
        sent = []
        pieces: Sequence[Tensor] = [shard]  # a device encodes fast, and has few large messages
        if not shard.is_cuda:
            pieces = shard.split(_ENCODED_AT_ONCE)
        for number, piece in enumerate(pieces):
            wire = codec.encode(piece)
            if feedback is not None:
                feedback.remember(piece, wire, layout, number * _ENCODED_AT_ONCE)
            sent.append((piece, wire, dist.all_reduce(wire, group=self.group, async_op=True)))

        def finish() -> None:
            for piece, wire, work in sent:
                assert work is not None
                work.wait()
                piece.copy_(wire)

        return finish

    def wire_bytes(self, numel: int, dtype: torch.dtype, layout: Layout | None = None) -> int:
        """See :meth:`InterNodeReduce.wire_bytes`."""
        size = dist.get_world_size(self.group)
        width = _bytes_per_element(_worthwhile(self.codec, dtype), dtype)
        return int(2 * numel * width * (size - 1) / size)


class BalancedExchange:
    """Balanced fusion buffers: part i of the shard is summed by server i, which sends the sum to everyone.

    Every node is a server for an equal byte range, whatever the tensors' sizes are: the parameter server without
    its hot spot (Herring, SC20). Two steps whatever the number of nodes, where a ring takes 2(n-1), and each value
    is encoded twice only.

    Args:
        scatter_group: carries the parts to their servers.
        gather_group: a second group of the same ranks; carries the sums back.
        codec: form of the values on the wire; None sends them as they are.
        feedback: remembers what encoding lost, on the way to the server and on the way back.
    """

    def __init__(
        self,
        scatter_group: dist.ProcessGroup,
        gather_group: dist.ProcessGroup,
        codec: Codec | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.scatter_group, self.gather_group = scatter_group, gather_group
        self.codec, self.feedback = codec, feedback

    def start(self, shard: Tensor, layout: Layout) -> Finish:
        """See :meth:`InterNodeReduce.start`."""
        codec = _worthwhile(self.codec, shard.dtype)
        feedback = self.feedback
        if codec is None:  # nothing is lost
            feedback = None
        size, rank = dist.get_world_size(self.scatter_group), self.scatter_group.rank()
        part = _part(shard.numel(), size, codec)
        if feedback is not None:
            feedback.add_to(shard, layout)
        padded, padding = shard, part * size - shard.numel()
        if padding:
            padded = torch.nn.functional.pad(shard, (0, padding))
        sent = _encode(codec, padded)
        if feedback is not None:
            feedback.remember(shard, _decode(codec, sent, shard.numel(), shard.dtype), layout)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.scatter_group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            own = _sum_rows(_decode(codec, received, part * size, shard.dtype).view(size, part))
            answer = _encode(codec, own)
            if feedback is not None:  # the server's loss, on the elements that exist
                low = min(rank * part, shard.numel())
                count = min(part, shard.numel() - low)
                decoded = _decode(codec, answer, part, shard.dtype)
                feedback.remember_more(own[:count], decoded[:count], layout, low)
            gathered = answer.new_empty(answer.numel() * size)
            all_gather_single(gathered, answer, self.gather_group)
            shard.copy_(_decode(codec, gathered, shard.numel(), shard.dtype))

        return finish

    def wire_bytes(self, numel: int, dtype: torch.dtype, layout: Layout | None = None) -> int:
        """See :meth:`InterNodeReduce.wire_bytes`."""
        size = dist.get_world_size(self.scatter_group)
        codec = _worthwhile(self.codec, dtype)
        width = _bytes_per_element(codec, dtype)
        return int(2 * _part(numel, size, codec) * width * (size - 1))


class ScatterExchange:
    """The first half of :class:`BalancedExchange`: part i of what all ranks bring is summed by rank i and stays there.

    Args:
        group: carries the parts to their owners.
        codec: form of the values on the wire; None sends them as they are.
        feedback: remembers what encoding lost.
    """

    def __init__(
        self, group: dist.ProcessGroup, codec: Codec | None = None, feedback: ErrorFeedback | None = None
    ) -> None:
        self.group, self.codec, self.feedback = group, codec, feedback

    def reduce(self, parts: Tensor, output: Tensor, layout_of: Callable[[], Layout] | None = None) -> None:
        """``output`` becomes the sum of this rank's part over the group.

        Args:
            parts: a row for each rank of the group, contiguous; with ``feedback`` its values change.
            output: flat, as large as a row.
            layout_of: returns the layout of all rows together, which is asked for where something is remembered.
        """
        codec, feedback, numel = _worthwhile(self.codec, parts.dtype), self.feedback, output.numel()
        rows = parts
        if codec is not None:
            if feedback is not None:
                assert layout_of is not None
                layout = layout_of()
                feedback.add_to(parts.view(-1), layout)
            rows = torch.nn.functional.pad(parts, (0, -numel % codec.block_size))  # so that no block is in two rows
        sent = _encode(codec, rows.view(-1))
        if codec is not None and feedback is not None:
            decoded = _decode(codec, sent, rows.numel(), rows.dtype).view(rows.shape)
            feedback.remember(parts.view(-1), decoded[:, :numel].reshape(-1), layout)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        terms = _decode(codec, received, rows.numel(), rows.dtype).view(rows.shape)
        output.copy_(_sum_rows(terms[:, :numel]))


def _part(numel: int, size: int, codec: Codec | None) -> int:
    """Elements a server: a multiple of the codec's block, so that parts are encoded independently."""
    block = 1
    if codec is not None:
        block = codec.block_size
    return -(-numel // (size * block)) * block


def _encode(codec: Codec | None, tensor: Tensor) -> Tensor:
    if codec is None:
        return tensor
    return codec.encode(tensor)


def _decode(codec: Codec | None, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    if codec is None:
        return wire[:numel]
    return codec.decode(wire, numel, dtype)


def _sum_rows(parts: Tensor) -> Tensor:
    """Sum of the rows in their order; halves are summed in fp32 and rounded once."""
    if parts.dtype in (torch.float16, torch.bfloat16):
        return parts.sum(0, dtype=torch.float32).to(parts.dtype)
    total = parts[0].clone()
    for row in parts[1:]:
        total.add_(row)
    return total
