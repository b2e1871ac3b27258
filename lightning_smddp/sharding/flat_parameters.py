"""Where the parameters are, and how a step of one rank's share comes to all.

CPU ranks of a node have theirs in flat memory that they share, and write what they have stepped into each other's.
Other ranks broadcast it by the backend.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.node_mesh import NodeMesh
from lightning_smddp.communication.shared_segments import create_file
from lightning_smddp.communication.tensors import broadcast_tensors
from lightning_smddp.sharding.flat_layout import FlatLayout, Piece, in_memory_order
from lightning_smddp.wording import counted


class FlatParameters:
    """The parameters of some layouts. Creation is collective over the node.

    Args:
        layouts: all of them.
        num_shares: in how many shares each is cut.
        share: the one that this rank steps; None if it steps none, as its node has more ranks than another one.
        group: the ranks, of neighbouring shares in their order, that exchange these by the backend; None if nobody.
        mesh: of the node's ranks, to share memory; None leaves parameters where they are.

    Raises:
        MemoryError: there is no memory to share; on all ranks of the node.
    """

    def __init__(
        self,
        layouts: list[FlatLayout],
        num_shares: int,
        share: int | None,
        group: dist.ProcessGroup | None = None,
        mesh: NodeMesh | None = None,
    ) -> None:
        self.layouts = layouts
        self.num_shares = num_shares
        self.share = share
        self._group = group
        self._mesh = mesh
        self._rows: list[Tensor] = []  # this rank's memory of each layout
        self._others: list[list[Tensor]] = []  # that of the node's other ranks
        self._homes: dict[nn.Parameter, Tensor] = {}  # the parameters' places, where a step writes
        if mesh is not None:
            for layout in layouts:
                self._move(layout, mesh)
        else:
            for slot in [slot for layout in layouts for slot in layout.slots]:
                self._homes[slot.parameter] = slot.parameter.detach()

    def _move(self, layout: FlatLayout, mesh: NodeMesh) -> None:
        own, *others = self._map(layout, mesh)
        self._rows.append(torch.frombuffer(own, dtype=layout.dtype))
        self._others.append([torch.frombuffer(other, dtype=layout.dtype) for other in others])
        for slot in layout.slots:
            # Of the row's memory, but with a storage of just its size: who saves a parameter saves no others.
            parameter = slot.parameter
            offset = slot.start * layout.dtype.itemsize
            flat = torch.frombuffer(own, dtype=layout.dtype, count=parameter.numel(), offset=offset)
            home = flat.as_strided(parameter.size(), parameter.stride())
            parameter.data = home.copy_(parameter.detach())
            self._homes[parameter] = home

    def _map(self, layout: FlatLayout, mesh: NodeMesh) -> list[mmap.mmap]:
        """Memory of all ranks of the node, this one's first."""
        # Files have no name: their descriptors go to the other ranks through the mesh's sockets. Behind the mappings
        # nobody needs them, and the memory is gone with the last mapping.
        size = layout.numel * layout.dtype.itemsize
        own: int | None = None
        with contextlib.suppress(OSError):  # no memory: the others learn of it by getting no descriptor
            own = create_file(size)
        descriptors = list(mesh.exchange(descriptor=own).descriptors.values())
        if own is not None:
            descriptors.insert(0, own)
        try:
            if len(descriptors) < mesh.size:
                raise MemoryError(
                    f"No {counted(size, 'byte')} of memory that ranks can share are left on "
                    f"{mesh.describe(mesh.rank)}'s node for the parameters. Give the job more memory, or use "
                    "strategy='smddp_fsdp', which divides the parameters, too."
                )
            return [mmap.mmap(descriptor, size) for descriptor in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def values(self, layout: int, piece: Piece) -> Tensor:
        """The memory that a step writes for a piece of this rank's share, as one dimension."""
        if self._mesh is not None:
            return self._rows[layout][piece.slot.start + piece.low : piece.slot.start + piece.high]
        parameter = piece.slot.parameter.detach()
        return in_memory_order(parameter, parameter)[piece.low : piece.high]

    def begin_step(self) -> None:
        """Before a step: parameters that were given other memory (``parameter.data = ...``) keep its values alone.

        Raises:
            ValueError: their shape or type is another one now.
        """
        for layout in self.layouts:
            for slot in layout.slots:
                parameter = slot.parameter
                home = self._homes.get(parameter)
                if home is None or parameter.data_ptr() == home.data_ptr():
                    continue
                if parameter.shape != home.shape or parameter.dtype != home.dtype:
                    before = f"{tuple(home.shape)}, {home.dtype}"
                    now = f"{tuple(parameter.shape)}, {parameter.dtype}"
                    raise ValueError(
                        f"{slot.name} was {before}, and is {now} now. With shard='optimizer' parameters keep their "
                        "shapes and types."
                    )
                parameter.data = home.copy_(parameter.detach())

    def end_step(self) -> None:
        """After a step: all ranks have all shares when it returns. Collective."""
        trained = [number for number, layout in enumerate(self.layouts) if _is_trained(layout)]
        parts = [(number, *part) for number in trained for part in enumerate(self._own_shares())]
        if self._group is not None:
            for number, source, share in parts:
                values = [self.values(number, piece) for piece in self.layouts[number].pieces_of_share(share)]
                broadcast_tensors(values, self._group, source, self.layouts[number].device)
        if self._mesh is not None:
            self._mesh.exchange()  # all have stepped, so nobody's code uses parameters now
            for number, _, share in parts:
                low, high = self.layouts[number].bounds[share : share + 2]
                for other in self._others[number]:
                    other[low:high].copy_(self._rows[number][low:high])
            self._mesh.exchange()

    def _own_shares(self) -> range:
        """This rank's share, and those that it gets by the backend."""
        if self.share is None:
            return range(0)
        if self._group is None:
            return range(self.share, self.share + 1)
        first = self.share - dist.get_rank(self._group)
        return range(first, first + dist.get_world_size(self._group))

    def close(self) -> None:
        """Give the parameters memory of their own. Not collective."""
        if self._mesh is not None:
            for parameter in self._homes:
                parameter.data = parameter.detach().clone()
        self._homes.clear()
        self._rows, self._others = [], []


def _is_trained(layout: FlatLayout) -> bool:
    # What was frozen behind its backward pass is stepped, too.
    parameters = [slot.parameter for slot in layout.slots]
    return any(parameter.requires_grad or parameter.grad is not None for parameter in parameters)
