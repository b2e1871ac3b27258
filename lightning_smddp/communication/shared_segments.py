"""Memory that the ranks of a node have in common, lent out for one collective at a time.

A segment is an anonymous memory file that all local ranks map: no name in a file system, no limit of a mount. Local
rank 0 makes one when none is free that is large enough, and passes its descriptor on.

All local ranks ask for the same segments in the same order, and each has to find the same one without a word. So
which ones are free is never what one rank sees by itself, but what all have told in exchanges that all have finished::

    rank 0   lend -> 3   begin(header)   ...   finish        lend -> 1: whoever held 1 told so in an exchange before
    rank 1   lend -> 3   begin(header)   ...   finish        lend -> 1

A rank lets go of a segment when the last tensor on it is gone, and tells it in its next message.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_smddp.communication.node_mesh import Arrival, NodeMesh
from lightning_smddp.wording import counted

_MAX_TOLD = 50  # numbers of segments in one message; the rest is told in later ones
GATHER, REDUCE = "gathers parameters", "reduces gradients"
_GROW = "needs more shared memory"


@dataclass
class _Segment:
    """A mapped memory file.

    Attributes:
        mapping: all of it.
        holders: the local ranks that have not said that they are done with it.
    """

    mapping: mmap.mmap
    holders: set[int] = field(default_factory=set)


class SharedSegments:
    """The segments of one node's ranks, and the exchanges that order what is done with them.

    An object belongs to one thread, as its mesh does. Calls come in the same order on all ranks of the node.

    Args:
        mesh: barrier with the node's ranks.
        names: of the units, for messages.
    """

    def __init__(self, mesh: NodeMesh, names: list[str]) -> None:
        self.mesh = mesh
        self._names = names
        self._segments: dict[int, _Segment] = {}
        self._next_number = 0
        self._let_go: deque[int] = deque()  # by this rank, not told yet
        self._begun: deque[tuple[str, list[int]]] = deque()  # what this rank said in exchanges not finished

    def lend(self, unit: int, size: int) -> Tensor:
        """A segment's first ``size`` bytes, the same memory on all ranks of the node, as a uint8 tensor.

        Whose part of it is whose is up to the caller. The segment comes back by itself when the last tensor on it
        is gone, on all ranks.

        Raises:
            ValueError: another rank does something else.
            RankFailedError: a peer is gone or did not come in time; only when memory has to grow.
            MemoryError: there is not enough.
        """
        self.finish_all()
        # No message says which segment is taken: each rank picks by itself, so all have to see the same ones free. They
        # do, as what was let go counts when the exchange that told of it is finished, here as on the peers.
        number = self._free_segment(size)
        if number is None:
            number = self._grow(unit, size)
        segment = self._segments[number]
        segment.holders = set(range(self.mesh.size))
        # torch keeps the view as long as a tensor's storage is there, which nobody else knows of. So the view's end is
        # that of the last tensor, wherever slices of it went. Not at exit: nobody is told then.
        view = memoryview(segment.mapping)
        weakref.finalize(view, self._let_go.append, number).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)[:size]

    def begin(self, kind: str, unit: int, size: int, descriptor: int | None = None) -> None:
        """Tell the peers that this rank has come to that point, without waiting for them."""
        does = (
            f"{kind} of {self._names[unit]!r} (unit {unit}, {counted(size, 'byte')})"  # the peers have to say the same
        )
        told = [self._let_go.popleft() for _ in range(min(len(self._let_go), _MAX_TOLD))]
        self.mesh.begin(json.dumps([does, *told]).encode(), descriptor)
        self._begun.append((does, told))

    def finish_all(self) -> None:
        """Wait until the peers have come to every point that this rank has told of.

        Raises:
            ValueError: a peer does something else.
            RankFailedError: a peer is gone or did not come in time.
        """
        while self._begun:
            self._finish()

    def close(self) -> None:
        """Let go of all segments. Tensors that are still there keep theirs. The mesh belongs to the caller."""
        self._segments.clear()
        self._begun.clear()

    def _free_segment(self, size: int) -> int | None:
        """The smallest that is free and large enough. Where all that are free are too small, the largest goes."""
        # By bytes.
        free = sorted((len(each.mapping), number) for number, each in self._segments.items() if not each.holders)
        for found_size, number in free:
            if found_size >= size:
                return number
        if free:
            _, largest = free[-1]
            del self._segments[largest]
        return None

    def _grow(self, unit: int, size: int) -> int:
        """Make a new segment of ``size`` bytes; returns its number. A barrier."""
        # Local rank 0 makes the file and passes its descriptor along, in an exchange that is finished at once. Where it
        # has none to pass, all of them fail in the same place.
        descriptor: int | None = None
        if self.mesh.rank == 0:
            with suppress(OSError):
                descriptor = create_file(size)
        try:
            self.begin(_GROW, unit, size, descriptor)
            arrival = self._finish()
            if descriptor is None:
                descriptor = arrival.descriptors.pop(0, None)
            if descriptor is None:
                raise MemoryError(
                    f"No {counted(size, 'byte')} of memory are left on {self.mesh.name}'s "
                    f"node to exchange {self._names[unit]!r}. Shard into smaller units, or give the job more memory."
                )
            mapping = mmap.mmap(descriptor, 0)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        number = self._next_number
        self._next_number += 1
        self._segments[number] = _Segment(mapping)
        return number

    def _finish(self) -> Arrival:
        does, told = self._begun.popleft()
        arrival = self.mesh.finish()
        # What this rank let go counts from here on only, not since it happened: the peers learn of it now. See `lend`.
        self._note(self.mesh.rank, told)
        for peer, message in arrival.messages.items():
            theirs, *peers_told = json.loads(message)
            if theirs != does:
                arrival.close_descriptors()
                them = self.mesh.describe(peer)
                raise ValueError(
                    f"Ranks do different things: {self.mesh.name} {does}, {them} {theirs}. Every rank has to run the "
                    "same layers in the same order, and use the same parameters."
                )
            self._note(peer, peers_told)
        return arrival

    def _note(self, rank: int, numbers: list[int]) -> None:
        """Local ``rank`` is done with these segments."""
        for number in numbers:
            if number in self._segments:
                self._segments[number].holders.discard(rank)


def create_file(size: int) -> int:
    """The descriptor of an anonymous memory file of ``size`` zero bytes, whose space is there already: no later SIGBUS.

    Raises:
        OSError: there is not enough memory.
    """
    descriptor = os.memfd_create("lightning_smddp", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, max(size, mmap.PAGESIZE))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
