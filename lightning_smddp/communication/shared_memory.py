"""Ranks of one node reduce through shared memory: values are not copied, and go through no socket.

DDP's own bucket is moved into a shared segment in place (by ``share_storage`` of ``_compat/torch.py``), and every rank
maps every other rank's bucket. Rank i then sums slice i of all of them, in chunks that stay in cache, and writes the
result straight into each bucket: two barriers and two passes over memory for an all-reduce.

Where the bucket cannot be moved (no space on the shared-memory mount), the rank copies it to an anonymous memory file,
which that mount does not limit, and back. Which way a rank goes is its own decision: it announces in
each barrier's message what the others find where. A tensor that has other memory than before (DDP makes its buckets
anew in the second step) is announced before that memory is shared: then nobody keeps the old one beside it.
"""

from __future__ import annotations

import cmath
import mmap
import os
import struct
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_smddp._compat.torch import share_storage
from lightning_smddp.communication.node_mesh import Arrival, NodeMesh, OnWait
from lightning_smddp.communication.shared_segments import create_file
from lightning_smddp.communication.topology import local_shard
from lightning_smddp.wording import counted

_CHUNK_BYTES = 256 * 2**10  # fits the level-2 cache together with the peers' chunks
_HEADER = struct.Struct("<BBqQQ")  # kind, dtype, slot, numel, byte offset in the segment
_SAME, _MAPPED, _COPIED, _MOVING = range(4)
_COPY = -1  # in the place of a slot: the memory to which a peer copies
_FINITE, _NOT_FINITE = b"\0", b"\1"
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
]  # fmt: skip

HOW_TO_RAISE = (
    "To use zero-copy shared memory, enlarge the mount at /dev/shm: `docker run --shm-size=8g`, an `emptyDir` "
    "volume with `medium: Memory` in Kubernetes, or `mount -o remount,size=8g /dev/shm`."
)


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
        # By slot the tensor that is shared, and where it was then: address and bytes.
        self._own: dict[int, tuple[Tensor, tuple[int, int]]] = {}
        self._peers: dict[tuple[int, int], Tensor] = {}  # by local rank and slot
        self._copy: Tensor | None = None
        self._copy_fd = -1
        self._copied_bytes: dict[int, int] = {}  # by slot

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
        shown, _ = self._meet(tensor, slot, bring=True)
        own_finite = self._reduce(shown, scale, push=True, watch=watch)
        arrival = self._exchange(_FINITE if own_finite else _NOT_FINITE)
        self._take_back(tensor, shown)
        return own_finite and _NOT_FINITE not in arrival.messages.values()

    def reduce_scatter(self, tensor: Tensor, slot: int, scale: float) -> Tensor:
        """``scale`` times the sum of this rank's shard over the local ranks, in ``tensor`` itself; returns that view.

        Peers may still be reading the other shards when this returns: leave these alone until an
        :meth:`all_gather` of the same tensor.
        """
        shown, is_copied = self._meet(tensor, slot, bring=True)
        self._reduce(shown, scale, push=False)
        if is_copied:  # what is copied next would overwrite what peers still read
            self._exchange()
        own = self._own_shard(tensor)
        self._take_back(own, [self._own_shard(each) for each in shown])
        return own

    def all_gather(self, tensor: Tensor, slot: int) -> None:
        """Write this rank's shard of ``tensor`` into all local ranks' tensors."""
        shown, _ = self._meet(tensor, slot, bring=False)
        own = self._own_shard(tensor)
        for each in shown:
            if each is not tensor:
                self._own_shard(each).copy_(own)
        self._exchange()
        self._take_back(tensor, shown)

    def close(self) -> None:
        """Drop all mappings. The mesh belongs to the caller."""
        self._own.clear()
        self._peers.clear()
        self._copy = None
        if self._copy_fd >= 0:
            os.close(self._copy_fd)
            self._copy_fd = -1

    def _meet(self, tensor: Tensor, slot: int, bring: bool) -> tuple[list[Tensor], bool]:
        """A barrier: what each local rank shows the others, its tensor or a copy of it, and whether one is a copy.

        ``bring``: the tensor's values go to the peers (else only the peers' come here).
        """
        kind, descriptor, offset = self._announce(tensor, slot)
        own = tensor
        if kind == _COPIED:
            assert self._copy is not None
            own = self._copy[: tensor.nbytes].view(tensor.dtype)
            if bring:
                own.copy_(tensor)
        header = _HEADER.pack(kind, _DTYPES.index(tensor.dtype), slot, tensor.numel(), offset)
        arrival = self._exchange(header, descriptor)
        kinds, shown = [kind], {self.mesh.rank: own}
        try:
            for peer, message in arrival.messages.items():
                kind, dtype, peer_slot, numel, offset = _HEADER.unpack(message)
                self._check(peer, tensor, slot, (_DTYPES[dtype], peer_slot, numel))
                kinds.append(kind)
                # A peer has one memory for all that it copies, and one for each tensor that it maps.
                key = (peer, _COPY if kind == _COPIED else slot)
                if peer in arrival.descriptors:
                    self._peers[key] = _map_descriptor(arrival.descriptors[peer], offset)
                if kind == _MOVING:
                    self._peers.pop(key, None)
                else:
                    shown[peer] = self._peers[key][: tensor.nbytes].view(tensor.dtype)
        finally:
            arrival.close_descriptors()  # the mappings stay
        if _MOVING in kinds:  # all see the same kinds, so all of them meet again
            return self._meet(tensor, slot, bring)
        return [shown[rank] for rank in sorted(shown)], _COPIED in kinds

    def _announce(self, tensor: Tensor, slot: int) -> tuple[int, int | None, int]:
        """How the peers find ``tensor``: (kind, descriptor to send, byte offset in it).

        One whose memory is another than before is to be announced again: before it is shared, the old is let go of.
        """
        if not self._zero_copy or tensor.numel() == 0:
            return self._announce_copy(tensor, slot)
        memory = (tensor.data_ptr(), tensor.nbytes)
        if slot in self._own:
            _, known_memory = self._own[slot]
            if known_memory == memory:
                return _SAME, None, 0
            del self._own[slot]
            return _MOVING, None, 0
        try:
            descriptor = share_storage(tensor)
        except RuntimeError as error:
            self._zero_copy = False
            warnings.warn(f"Gradients are copied to shared memory from now on: {error}. {HOW_TO_RAISE}", stacklevel=2)
            return self._announce_copy(tensor, slot)
        # Holding the tensor keeps its address from going to another one while peers have it mapped.
        self._own[slot] = (tensor, (tensor.data_ptr(), tensor.nbytes))
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
        return _MAPPED, descriptor, offset

    def _announce_copy(self, tensor: Tensor, slot: int) -> tuple[int, int | None, int]:
        """The copy's memory goes to the peers where they do not have it yet, or not large enough."""
        if self._copied_bytes.get(slot, tensor.nbytes) != tensor.nbytes:
            # DDP has made its buckets anew: the first step's is as large as the whole model.
            self._copied_bytes, self._copy = {}, None
        self._copied_bytes[slot] = tensor.nbytes
        if self._copy is not None and self._copy.numel() >= tensor.nbytes:
            return _COPIED, None, 0
        if self._copy_fd >= 0:
            os.close(self._copy_fd)
        self._copy_fd = create_file(tensor.nbytes)
        self._copy = _map_descriptor(self._copy_fd, 0)
        return _COPIED, self._copy_fd, 0

    def _check(self, peer: int, tensor: Tensor, slot: int, announced: tuple[torch.dtype, int, int]) -> None:
        if announced == (tensor.dtype, slot, tensor.numel()):
            return
        dtype, peer_slot, numel = announced
        us = self.mesh.describe(self.mesh.rank)
        them = self.mesh.describe(peer)
        raise ValueError(
            f"Ranks reduce different tensors: {us} brings bucket {slot} with {counted(tensor.numel(), 'element')} of "
            f"{tensor.dtype}, {them} bucket {peer_slot} with {numel} of {dtype}. "
            "The models, or the order in which their layers run, differ between ranks."
        )

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

    def _take_back(self, tensor: Tensor, shown: list[Tensor]) -> None:
        """A rank that shows a copy takes into its own tensor what was written there."""
        own = shown[self.mesh.rank]
        if own.data_ptr() != tensor.data_ptr():
            tensor.copy_(own)

    def _exchange(self, message: bytes = b"\0", descriptor: int | None = None) -> Arrival:
        arrival = self.mesh.exchange(message, descriptor)
        if self._on_wait is not None:
            self._on_wait(arrival.waited_s, arrival.last)
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


def free_bytes() -> int:
    """Free space of the mount that zero-copy buckets live on."""
    if not os.path.isdir("/dev/shm"):
        return 0
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize


def _map_descriptor(descriptor: int, offset: int) -> Tensor:
    """All bytes of a shared-memory file from ``offset`` on, as a writable uint8 tensor that keeps the mapping."""
    mapping = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    return torch.frombuffer(mapping, dtype=torch.uint8)[offset:]
