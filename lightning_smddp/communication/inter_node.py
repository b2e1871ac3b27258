"""Sums between nodes: how one shard, already summed inside each node, is summed over the nodes.

``start(shard, slot)`` begins the exchange and returns the function that completes it; between the two the caller may
start others. ``start`` and completion may run in different threads, each in the same order on every rank, so the
two phases use a process group each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.compression import Codec, ErrorFeedback, ExactCodec
from lightning_smddp.communication.shared_memory import add_up, sum_dtype

Finish = Callable[[], object]

_EXACT = ExactCodec()
_ENCODED_AT_ONCE = 2**18  # elements that are encoded at a time, while the ones before are on the wire


def _worthwhile(codec: Codec, feedback: ErrorFeedback | None, dtype: torch.dtype) -> tuple[Codec, ErrorFeedback | None]:
    """``codec`` with ``feedback`` if it makes values of ``dtype`` smaller; what would only round is left out."""
    return (codec, feedback) if codec.itemsize < dtype.itemsize else (_EXACT, None)


class RingExchange:
    """The backend's own all-reduce (a ring on gloo), of the values as they are or as ``codec`` (a cast) rounds them.

    The ring also rounds the sums on its way, which error feedback does not see.
    """

    def __init__(self, group: dist.ProcessGroup, codec: Codec, feedback: ErrorFeedback | None) -> None:
        self.group = group
        self.codec = codec
        self.feedback = feedback

    def start(self, shard: Tensor, slot: int) -> Finish:
        """Begin the sum of ``shard``; the returned function waits and leaves the sum in ``shard``.

        ``slot`` is the bucket's number, for what is remembered from step to step (error feedback).
        """
        codec, feedback = _worthwhile(self.codec, self.feedback, shard.dtype)
        if feedback is not None:
            # The order matters: what was lost before goes into the values that are encoded, and what is lost now is the
            # difference of those and of what the wire carries. Nothing is lost for good.
            feedback.add_to(shard, slot)
        sent = []
        # Few messages where nothing is encoded, or fast, by a device.
        pieces = [shard] if codec is _EXACT or shard.is_cuda else shard.split(_ENCODED_AT_ONCE)
        for number, piece in enumerate(pieces):
            wire = codec.encode(piece)
            if feedback is not None:
                feedback.remember(piece, wire, slot, number * _ENCODED_AT_ONCE)
            work = dist.all_reduce(wire, group=self.group, async_op=True)
            assert work is not None
            sent.append((piece, wire, work))

        def finish() -> None:
            for piece, wire, work in sent:
                work.wait()
                piece.copy_(wire)  # nothing where they are one

        return finish


class BalancedExchange:
    """Balanced fusion buffers: part i of the shard is summed by server i, which sends the sum to everyone.

    Every node is a server for an equal byte range, whatever the tensors' sizes are: the parameter server without
    its hot spot (Herring, SC20). Two steps whatever the number of nodes, where a ring takes 2(n-1), and each value
    is encoded twice only.

    Args:
        scatter_group: carries the parts to their servers.
        gather_group: a second group of the same ranks; carries the sums back.
        codec: form of the values on the wire.
        feedback: remembers what encoding lost, on the way to the server and on the way back.
    """

    def __init__(
        self,
        scatter_group: dist.ProcessGroup,
        gather_group: dist.ProcessGroup,
        codec: Codec,
        feedback: ErrorFeedback | None,
    ) -> None:
        self.scatter_group = scatter_group
        self.gather_group = gather_group
        self.codec = codec
        self.feedback = feedback

    def start(self, shard: Tensor, slot: int) -> Finish:
        """See :meth:`RingExchange.start`."""
        # With 3 servers and 7 elements, which are padded to 9 (a part is 3, or with a codec a multiple of its block):
        #     shard     | 0 1 2 | 3 4 5 | 6 - - |    of each rank: part i goes to server i
        #     server 1  | 3 4 5 | of every rank      their sum goes back to everyone
        codec, feedback = _worthwhile(self.codec, self.feedback, shard.dtype)
        size = dist.get_world_size(self.scatter_group)
        rank = self.scatter_group.rank()
        numel, dtype = shard.numel(), shard.dtype
        # Elements a server: a multiple of the codec's block, so that parts are encoded independently.
        part = -(-numel // (size * codec.block_size)) * codec.block_size
        if feedback is not None:
            feedback.add_to(shard, slot)
        sent = codec.encode(padded(shard, part * size))
        if feedback is not None:
            feedback.remember(shard, codec.decode(sent, numel, dtype), slot)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.scatter_group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            terms = codec.decode(received, part * size, dtype)
            total = shard.new_empty(part, dtype=sum_dtype(dtype))
            add_up(terms.view(size, part).unbind(), total)
            del terms  # as large as the shard
            own = total.to(dtype)
            answer = codec.encode(own)
            if feedback is not None:  # the server's loss, on the elements that are no padding
                low = min(rank * part, numel)
                count = min(part, numel - low)
                carried = codec.decode(answer, part, dtype)
                feedback.remember_more(own[:count], carried[:count], slot, low)
                del carried
            gathered = answer.new_empty(answer.numel() * size)
            dist.all_gather_single(gathered, answer, self.gather_group)
            sums = codec.decode(gathered, numel, dtype)
            shard.copy_(sums)

        return finish


InterNodeReduce = RingExchange | BalancedExchange
"""What sums a tensor over a group, in place."""


def padded(tensor: Tensor, numel: int) -> Tensor:
    """``tensor`` with zeros behind it, up to ``numel`` elements; itself if it needs none."""
    missing = numel - tensor.numel()
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
