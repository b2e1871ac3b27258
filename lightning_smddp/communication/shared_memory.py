"""Ranks of one node reduce through shared memory: values are not copied, and go through no socket.

DDP's own bucket is moved into a shared segment in place (by ``share_storage`` of ``_compat/torch.py``), and every rank
maps every other rank's bucket. Rank i then sums slice i of all of them, in chunks that stay in cache, and writes the
result straight into each bucket: two barriers and two passes over memory for an all-reduce.

Where the shared-memory mount is too small for the buckets, each is copied to an anonymous memory file of its own, which
that mount does not limit, and back; so does a rank for which the mount is full later. Each barrier's message announces
what the others find where. A tensor that has other memory than before (DDP makes its buckets anew in the second step)
is announced before that memory is shared: then nobody keeps the old one beside it.
"""

from __future__ import annotations

import cmath
import mmap
import os
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_smddp._compat.torch import share_storage
from lightning_smddp.communication.node_mesh import Arrival, NodeMesh, OnWait
from lightning_smddp.communication.shared_segments import create_file
from lightning_smddp.communication.topology import local_shard

_CHUNK_BYTES = 256 * 2**10  # fits the level-2 cache together with the peers' chunks
_SAME, _MAPPED, _MOVING = "same", "mapped", "moving"
_FINITE, _NOT_FINITE = b"\0", b"\1"

HOW_TO_RAISE = "To spare the copies, enlarge /dev/shm: `docker run --shm-size=8g`, for example."


class SharedMemory:
    """The ranks of one node, reducing through each other's memory.

    An object belongs to one thread, as its mesh does.

    Args:
        mesh: barrier with the node's ranks.
        num_shards: in how many shards a tensor is cut; local ranks from ``num_shards`` on own an empty one.
        on_wait: called after each barrier.
        zero_copy: False copies every tensor.
    """

    def __init__(
        self,
        mesh: NodeMesh,
        num_shards: int | None = None,
        on_wait: OnWait | None = None,
        zero_copy: bool = True,
    ) -> None:
        self.mesh = mesh
        self.num_shards = num_shards or mesh.size
        self._on_wait = on_wait
        self._zero_copy = zero_copy
        # By slot what this rank shows the others, its tensor or a copy of it, and what that stands for: the tensor's
        # address and bytes.
        self._own: dict[int, tuple[Tensor, tuple[int, int]]] = {}
        self._peers: dict[tuple[int, int], Tensor] = {}  # by local rank and slot

    def all_reduce(self, tensor: Tensor, slot: int, scale: float = 1.0, watch: bool = False) -> bool:
        """``tensor`` becomes ``scale`` times the sum of the local ranks' tensors, in place, bit-equal on all.

        Returns whether the sum is finite, the same on all ranks; True without ``watch``. Where it is not, each rank's
        ``tensor`` keeps what came from that rank, in chunks, so that the rank can see whether it was the cause.

        Args:
            tensor: 1-D and contiguous, of one size and dtype on all ranks.
            slot: a number that names this tensor for good, so that its memory is shared once.
            scale: factor of the sum.
            watch: look for NaN and inf; the same on all ranks.

        Raises:
            ValueError: sizes or dtypes differ between ranks.
            RankFailedError: a peer is gone or did not come in time.
        """
        # rank 0: [a|b|c]   rank 1: [a|b|c]   rank 2: [a|b|c]      all full: a barrier, in `_meet`
        # Rank 0 alone reads and writes every `a`, rank 1 every `b`, and so on: between the barriers no two ranks touch
        # the same bytes, so there are no locks. Behind the second barrier all slices are written.
        shown = self._meet(tensor, slot, bring=True)
        own_finite = self._reduce(shown, scale, push=True, watch=watch)
        arrival = self._exchange(_FINITE if own_finite else _NOT_FINITE)
        _copy(shown[self.mesh.rank], tensor)
        return own_finite and _NOT_FINITE not in arrival.messages.values()

    def reduce_scatter(self, tensor: Tensor, slot: int, scale: float) -> Tensor:
        """``scale`` times the sum of this rank's shard over the local ranks, in ``tensor`` itself; returns that view.

        Peers may still be reading the other shards when this returns: leave these alone until an
        :meth:`all_gather` of the same tensor.
        """
        shown = self._meet(tensor, slot, bring=True)
        self._reduce(shown, scale, push=False)
        own = self._own_shard(tensor)
        _copy(self._own_shard(shown[self.mesh.rank]), own)
        return own

    def all_gather(self, tensor: Tensor, slot: int) -> None:
        """Write this rank's shard of ``tensor`` into all local ranks' tensors."""
        shown = self._meet(tensor, slot, bring=False)
        own = self._own_shard(tensor)
        for each in shown:
            _copy(own, self._own_shard(each))
        self._exchange()
        _copy(shown[self.mesh.rank], tensor)

    def close(self) -> None:
        """Drop all mappings. The mesh belongs to the caller."""
        self._own.clear()
        self._peers.clear()

    def _meet(self, tensor: Tensor, slot: int, bring: bool) -> list[Tensor]:
        """A barrier; what each local rank shows the others, its tensor or a copy of it.

        ``bring``: the tensor's values go to the peers (else only the peers' come here).
        """
        kind, descriptor, offset = self._announce(tensor, slot)
        kinds = [kind]
        shown: dict[int, Tensor] = {}
        if kind != _MOVING:
            own = self._own[slot][0].view(tensor.dtype)
            shown[self.mesh.rank] = own
            if bring:
                _copy(tensor, own)
        what = f"bucket {slot} of {tensor.numel()} x {tensor.dtype}"
        try:
            arrival = self._exchange(f"{kind} {offset} {what}".encode(), descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        try:
            for peer, message in arrival.messages.items():
                kind, place, theirs = message.decode().split(" ", 2)
                if theirs != what:
                    raise ValueError(
                        f"Ranks reduce different tensors: {self.mesh.name} {what}, "
                        f"{self.mesh.describe(peer)} {theirs}. The models, or the order in which their layers run, "
                        "differ between ranks."
                    )
                kinds.append(kind)
                key = (peer, slot)
                if kind == _MOVING:
                    del self._peers[key]
                    continue
                if kind == _MAPPED:
                    self._peers[key] = _map_descriptor(arrival.descriptors[peer], int(place))
                shown[peer] = self._peers[key][: tensor.nbytes].view(tensor.dtype)
        finally:
            arrival.close_descriptors()  # the mappings stay
        if _MOVING in kinds:  # all see the same kinds, so all of them meet again
            return self._meet(tensor, slot, bring)
        return [shown[rank] for rank in sorted(shown)]

    def _announce(self, tensor: Tensor, slot: int) -> tuple[str, int | None, int]:
        """How the peers find ``tensor``: (kind, descriptor to send and close, byte offset in it).

        One whose memory is another than before is to be announced again: before it is shared, the old is let go of.
        """
        moves = self._zero_copy and tensor.numel() > 0
        if slot in self._own:
            _, memory = self._own[slot]
            if memory == (tensor.data_ptr() if moves else 0, tensor.nbytes):
                return _SAME, None, 0
            del self._own[slot]
            return _MOVING, None, 0
        if not moves:
            descriptor = create_file(tensor.nbytes)
            self._own[slot] = (_map_descriptor(descriptor, 0)[: tensor.nbytes], (0, tensor.nbytes))
            return _MAPPED, descriptor, 0
        try:
            descriptor = os.dup(share_storage(tensor))
        except RuntimeError as error:  # what others put there since training started: modules, workers of a loader
            self._zero_copy = False
            warnings.warn(f"Gradients are copied from now on: {error}. {HOW_TO_RAISE}", stacklevel=2)
            return self._announce(tensor, slot)
        # Holding the tensor keeps its address from going to another one while peers have it mapped.
        self._own[slot] = (tensor, (tensor.data_ptr(), tensor.nbytes))
        return _MAPPED, descriptor, int(tensor.storage_offset()) * tensor.dtype.itemsize

    def _reduce(self, shown: list[Tensor], scale: float, push: bool, watch: bool = False) -> bool:
        """Sum this rank's shard in the order of local ranks, chunk by chunk.

        With ``push`` the sum is written into the peers' tensors as well. With ``watch`` a chunk whose sum is not finite
        stays as it was; returns whether there was none.
        """
        rank, dtype = self.mesh.rank, shown[0].dtype
        shards = [self._own_shard(each) for each in shown]
        finite = True
        wide = sum_dtype(dtype)
        step = _CHUNK_BYTES // wide.itemsize
        scratch = torch.empty(min(step, shards[rank].numel()), dtype=wide)
        in_place = self.mesh.size == 2 and wide == dtype and not watch  # two terms: their order does not matter
        # Of each chunk `terms` has what every local rank brings, by local rank; `own` is this rank's.
        for terms in zip(*[shard.split(step) for shard in shards], strict=True):
            own = terms[rank]
            total = own if in_place else scratch[: own.numel()]
            add_up(terms, total)
            if watch and not _is_finite(total):
                finite = False
                continue
            write_scaled(total, scale, own)
            if push:
                for term in terms:
                    if term is not own:
                        term.copy_(own)
        return finite

    def _own_shard(self, tensor: Tensor) -> Tensor:
        return tensor[local_shard(tensor.numel(), self.num_shards, self.mesh.rank)]

    def _exchange(self, message: bytes = b"\0", descriptor: int | None = None) -> Arrival:
        arrival = self.mesh.exchange(message, descriptor)
        if self._on_wait is not None:
            self._on_wait(arrival.waited_s)
        return arrival


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of ``dtype`` are summed: fp32 for 16-bit types, which are rounded once at the end."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


def add_up(terms: Sequence[Tensor], total: Tensor) -> None:
    """The sum in the order of ``terms``, written to ``total``, which may be one of only two."""
    if len(terms) > 1 and total.dtype == terms[0].dtype:
        torch.add(terms[0], terms[1], out=total)
        rest = terms[2:]
    else:
        total.copy_(terms[0])
        rest = terms[1:]
    for term in rest:
        total.add_(term)


def write_scaled(total: Tensor, scale: float, output: Tensor) -> None:
    """``output`` becomes ``scale`` times ``total``, which is ``output`` itself, or memory that may be overwritten."""
    if total.dtype != output.dtype:
        if scale != 1.0:
            total.mul_(scale)  # before it is rounded
        output.copy_(total)
    elif scale != 1.0:
        torch.mul(total, scale, out=output)
    elif total is not output:
        output.copy_(total)


def _is_finite(values: Tensor) -> bool:
    # One number tells of most chunks that all is finite. The sum may also overflow where no value does: then look at
    # all of them.
    total = values.sum().item()
    return cmath.isfinite(total) or bool(values.isfinite().all())


def _copy(source: Tensor, target: Tensor) -> None:
    """Nothing where the two are the same memory."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _map_descriptor(descriptor: int, offset: int) -> Tensor:
    """All bytes of a shared-memory file from ``offset`` on, as a writable uint8 tensor that keeps the mapping."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)[offset:]
