"""Where the parameters are, and how a step of one rank's share comes to all: two kinds of copies.

=================== ================================== =========================================================
``NodeCopies``      CPU ranks of one or more nodes     one copy a node, in shared memory: nothing is sent inside it
``RankCopies``      devices; CPUs without such memory  a copy each: shares are gathered after the step
=================== ================================== =========================================================

Both hold the parameters' layouts, and are told when a step begins and ends.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat.torch import all_gather_single
from lightning_smddp.communication.node_mesh import NodeMesh
from lightning_smddp.communication.shared_segments import create_file
from lightning_smddp.sharding.flat_layout import FlatLayout, Piece, in_memory_order
from lightning_smddp.sharding.node_memory import NodeMemory, page_ranges
from lightning_smddp.wording import counted

_WINDOW = 4 * 2**20  # elements that are gathered at a time: of a large share no second copy is made
_DIGEST = struct.Struct("<qI")  # of the pages that a rank has written: how many, and the CRC-32 of their numbers
_TEXT_BYTES = 200  # of a message in the mesh


class Copies(Protocol):
    """The parameters of some layouts, and the shares that this rank steps.

    Attributes:
        layouts: all of them.
        num_shares: in how many shares each is cut.
        share: the one that this rank steps; None if it steps none.
    """

    layouts: list[FlatLayout]
    num_shares: int
    share: int | None

    def values(self, layout: int, piece: Piece) -> Tensor:
        """The memory that a step writes for a piece of this rank's share, as one dimension."""

    def begin_step(self) -> None:
        """Before a step. Where ranks have one copy, all have come when it returns, so nobody uses it. Collective."""

    def end_step(self) -> None:
        """After a step: all ranks' shares are in all copies when it returns. Collective."""

    def close(self) -> None:
        """Give the parameters memory of their own. Not collective."""


class RankCopies:
    """Each rank has a copy. Parameters keep their memory; a step writes there.

    Args:
        layouts: cut into as many shares as ``group`` has ranks.
        group: the ranks that share the optimizer's work.
    """

    def __init__(self, layouts: list[FlatLayout], group: dist.ProcessGroup) -> None:
        self.layouts = layouts
        self._group = group
        self.num_shares = dist.get_world_size(group)
        self.share: int | None = group.rank()

    def values(self, layout: int, piece: Piece) -> Tensor:
        """See :meth:`Copies.values`."""
        return _values_of(piece)

    def begin_step(self) -> None:
        """Nothing: others do not see this rank's parameters."""

    def end_step(self) -> None:
        """All-gather what changed, some megabytes at a time."""
        with torch.no_grad():
            for layout in self.layouts:
                if _is_trained(layout):
                    self._gather(layout)

    def _gather(self, layout: FlatLayout) -> None:
        # All ranks go through their own shares in windows of the same size, as far as the longest share goes: those of
        # whole parameters differ in length. What a window has behind a share's end is never copied out.
        width = max(high - low for low, high in pairwise(layout.bounds))
        for start in range(0, width, _WINDOW):
            size = min(_WINDOW, width - start)
            own = torch.zeros(size, dtype=layout.dtype, device=layout.device)
            self._copy(layout, self._group.rank(), start, own, to_parameters=False)
            gathered = own.new_empty(size * self.num_shares)
            all_gather_single(gathered, own, self._group)
            for share, window in enumerate(gathered.split(size)):
                if share != self.share:
                    self._copy(layout, share, start, window, to_parameters=True)

    def _copy(self, layout: FlatLayout, share: int, start: int, window: Tensor, to_parameters: bool) -> None:
        """Between a window of a share, from its element ``start`` on, and the parameters."""
        low = layout.bounds[share] + start
        high = min(low + window.numel(), layout.bounds[share + 1])
        for piece in layout.pieces(low, high):
            begin = piece.slot.start + piece.low - low
            end = piece.slot.start + piece.high - low
            part = window[begin:end]
            values = _values_of(piece)
            if to_parameters:
                values.copy_(part)
            else:
                part.copy_(values)

    def close(self) -> None:
        """Nothing: parameters have memory of their own."""


class NodeCopies:
    """The ranks of a node have one copy. See :mod:`~lightning_smddp.sharding.node_memory`.

    Parameters become views of memory that the node's first rank has filled. Creation is collective over the node, and
    everyone's parameters are equal.

    Args:
        layouts: of parameters on the CPU, cut into ``num_shares``.
        mesh: of the node's ranks.
        share: this rank's; None if it has none, as its node has more ranks than another one.
        num_shares: of all nodes.
        between_nodes: this rank and those of other nodes that have the neighbouring shares, one a node, in the order
            of their shares; None where there is one node.

    Raises:
        MemoryError: there is no memory for a copy; on all ranks of the node.
    """

    def __init__(
        self,
        layouts: list[FlatLayout],
        mesh: NodeMesh,
        share: int | None,
        num_shares: int,
        between_nodes: dist.ProcessGroup | None = None,
    ) -> None:
        self.layouts = layouts
        self._mesh = mesh
        self._between_nodes = between_nodes
        self.share = share
        self.num_shares = num_shares
        # For each layout: the node's copy, the parameters' views of it by name, and the pages that this rank has
        # written since the last step.
        self._memories = [self._map(layout) for layout in layouts]
        self._homes: list[dict[str, Tensor]] = []
        for layout, memory in zip(layouts, self._memories, strict=True):
            self._homes.append(self._move(layout, memory))
        self._written: list[Tensor] = []

    def _map(self, layout: FlatLayout) -> NodeMemory:
        """The first rank's file, in all of the node's ranks."""
        # The file has no name: its descriptor goes to the other ranks through the mesh's sockets. Behind the mapping
        # nobody needs one, and the memory is gone with the last mapping.
        size = layout.numel * layout.dtype.itemsize
        descriptor: int | None = None
        if self._mesh.rank == 0:
            with contextlib.suppress(OSError):  # no memory: the others learn of it by getting no descriptor
                descriptor = create_file(size)
        arrival = self._mesh.exchange(descriptor=descriptor)
        if self._mesh.rank != 0:
            descriptor = arrival.descriptors.pop(0, None)
        if descriptor is None:
            rank = self._mesh.describe(self._mesh.rank)
            raise MemoryError(
                f"No {counted(size, 'byte')} of memory are left on {rank}'s node for the one copy of the parameters "
                "that its ranks share. Give the job more memory, or use strategy='smddp_fsdp', which divides the "
                "parameters, too."
            )
        try:
            return NodeMemory(descriptor)
        finally:
            os.close(descriptor)

    def _move(self, layout: FlatLayout, memory: NodeMemory) -> dict[str, Tensor]:
        """Let the parameters be views of the node's copy; returns these, by name."""
        # The first rank fills the file through its shared view. The others may look at it behind the exchange, and not
        # before.
        if self._mesh.rank == 0:
            for slot in layout.slots:
                values = _shared(memory, layout, slot.start, slot.stop)
                values.copy_(in_memory_order(slot.parameter.detach(), slot.parameter))
        self._mesh.exchange()
        homes = {}
        for slot in layout.slots:
            parameter = slot.parameter
            flat = memory.view(layout.dtype, slot.start * layout.dtype.itemsize, parameter.numel())
            home = flat.as_strided(parameter.size(), parameter.stride())
            homes[slot.name] = home
            # Reads see the file; a write goes to a page of this rank's own (a private mapping), until `begin_step` has
            # published it. So user code that writes to a parameter disturbs no other rank.
            parameter.data = home
        return homes

    def values(self, layout: int, piece: Piece) -> Tensor:
        """See :meth:`Copies.values`."""
        low = piece.slot.start + piece.low
        high = piece.slot.start + piece.high
        return _shared(self._memories[layout], self.layouts[layout], low, high)

    def begin_step(self) -> None:
        """Wait for the node's ranks, and put what user code has written since the last step into the copy.

        All ranks write the same, as they would to copies of their own, so each publishes its share of it.

        Raises:
            ValueError: user code has written other parameters on this rank than on others.
        """
        # private view -> pages that it wrote -> the same on all ranks? -> publish its share -> the step
        # The barrier in the comparison comes before any page is published: nobody sees a file that is half of this
        # step.
        self._bring_home()
        self._written = [memory.written_pages() for memory in self._memories]
        if not self._all_wrote_alike():
            self._require_same_writes()
        with torch.no_grad():
            for layout, memory, pages in zip(self.layouts, self._memories, self._written, strict=True):
                low, high = self._own_range(layout)
                size = layout.dtype.itemsize
                memory.publish(pages, low * size, high * size)

    def end_step(self) -> None:
        """Send shares to other nodes, wait for the node's ranks, and see the copy again where user code wrote."""
        if self._between_nodes is not None:
            for layout, memory in zip(self.layouts, self._memories, strict=True):
                if _is_trained(layout):
                    self._gather_between_nodes(layout, memory, self._between_nodes)
        # Behind this barrier every share is stepped. Only then may private pages go, which hid the file from this rank:
        # from here on it sees what all ranks have made of it.
        self._mesh.exchange()
        for memory, pages in zip(self._memories, self._written, strict=True):
            memory.drop(pages)
        self._written = []

    def _own_range(self, layout: FlatLayout) -> tuple[int, int]:
        """What this rank answers for in its node: its share, and those of its partners in other nodes."""
        if self.share is None:
            return 0, 0
        # Partners have neighbouring shares, in the order of their ranks between nodes.
        first = self.share
        count = 1
        if self._between_nodes is not None:
            first -= self._between_nodes.rank()
            count = dist.get_world_size(self._between_nodes)
        return layout.bounds[first], layout.bounds[first + count]

    def _gather_between_nodes(self, layout: FlatLayout, memory: NodeMemory, group: dist.ProcessGroup) -> None:
        # Partners send their shares in turn, straight out of the node's copy and into it: each other rank of the node
        # does the same with partners of its own, on other shares.
        assert self.share is not None
        first = self.share - group.rank()
        for other in range(dist.get_world_size(group)):
            low = layout.bounds[first + other]
            high = layout.bounds[first + other + 1]
            for start in range(low, high, _WINDOW):
                part = _shared(memory, layout, start, min(start + _WINDOW, high))
                dist.broadcast(part, group=group, group_src=other)

    def _bring_home(self) -> None:
        """Parameters that were given other memory (``parameter.data = ...``) keep its values, but not the memory.

        Raises:
            ValueError: their shape or type is another one now.
        """
        for layout, homes in zip(self.layouts, self._homes, strict=True):
            for slot in layout.slots:
                parameter = slot.parameter
                home = homes[slot.name]
                if parameter.data_ptr() == home.data_ptr():
                    continue
                if parameter.shape != home.shape or parameter.dtype != home.dtype:
                    before = f"{tuple(home.shape)}, {home.dtype}"
                    now = f"{tuple(parameter.shape)}, {parameter.dtype}"
                    raise ValueError(
                        f"{slot.name} was {before}, and is {now} now. With shard='optimizer' parameters keep their "
                        "shapes and types."
                    )
                # A write to the private view, as if user code had written to the parameter in place.
                home.copy_(parameter.detach())
                parameter.data = home

    def _all_wrote_alike(self) -> bool:
        """Whether all ranks of the node have written to the same pages. A barrier, too."""
        count = 0
        digest = 0
        for pages in self._written:
            count += pages.numel()
            digest = zlib.crc32(pages.numpy().tobytes(), digest)
        mine = _DIGEST.pack(count, digest)
        arrival = self._mesh.exchange(mine)
        return all(theirs == mine for theirs in arrival.messages.values())

    def _require_same_writes(self) -> None:
        """Leave out pages that were written with what was there, as when weights are swapped, and swapped back."""
        # A page counts as written if anything was written to it, be it the same. Ranks may differ in these: what has to
        # be equal are the pages whose bytes are not the file's.
        written = self._written
        self._written = []
        for memory, pages in zip(self._memories, written, strict=True):
            self._written.append(memory.differing(pages))
        names = ", ".join(self._names_on(self._written)) or "none"
        is_same = self._all_wrote_alike()
        told = self._mesh.exchange(names.encode()[:_TEXT_BYTES])
        if not is_same:
            raise self._error_of_writes(names, told.messages)
        # What was left out is the file's again; `end_step` drops the rest, behind the step.
        for memory, before, now in zip(self._memories, written, self._written, strict=True):
            is_left_out = ~torch.isin(before, now)
            memory.drop(before[is_left_out])

    def _error_of_writes(self, names: str, messages: Mapping[int, bytes]) -> ValueError:
        """Says which parameters each rank has written; ``messages`` has the others' names by local rank."""
        topology = self._mesh.topology
        names_of = {topology.rank: names}
        for local, text in messages.items():
            names_of[topology.local_ranks[local]] = text.decode(errors="replace")
        written = "; ".join(f"{topology.describe(rank)}: {names_of[rank]}" for rank in sorted(names_of))
        return ValueError(
            f"User code has written to other parameters on some ranks than on others ({written}). Replicas have to "
            "stay equal: write the same values on every rank, or leave out shard='optimizer' to let them differ."
        )

    def _names_on(self, written: list[Tensor]) -> list[str]:
        """Names of the parameters that have something on these pages."""
        names = []
        for layout, pages in zip(self.layouts, written, strict=True):
            size = layout.dtype.itemsize
            ranges = page_ranges(pages)
            for slot in layout.slots:
                first = slot.start * size
                last = slot.stop * size - 1
                if any(low <= last and first < high for low, high in ranges):
                    names.append(slot.name)
        return names

    def close(self) -> None:
        """Copy the parameters to memory of this rank's own."""
        if not self._memories:
            return
        for layout in self.layouts:
            for slot in layout.slots:
                slot.parameter.data = slot.parameter.detach().clone()
        self._memories = []


def _is_trained(layout: FlatLayout) -> bool:
    return any(slot.parameter.requires_grad for slot in layout.slots)


def _values_of(piece: Piece) -> Tensor:
    parameter = piece.slot.parameter.detach()
    return in_memory_order(parameter, parameter)[piece.low : piece.high]


def _shared(memory: NodeMemory, layout: FlatLayout, low: int, high: int) -> Tensor:
    """Elements [low, high) of the layout, in the copy that all ranks see."""
    size = layout.dtype.itemsize
    return memory.shared[low * size : high * size].view(layout.dtype)
