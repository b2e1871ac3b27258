"""Which parameters' gradients are where in the reduce-scatter of a unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from lightning_smddp.communication.buckets import Layout, Piece

Parameter = tuple[str, torch.Size, bool]
"""Of a parameter the name in the whole module, the whole shape, and whether it has gradients."""


class UnitLayout:
    """FSDP2 lays a unit's gradients out rank by rank: of each parameter some rows, padded to equally many.

    Args:
        number: the unit's, the same on all ranks.
        size: ranks that share each parameter.
        parameters: returns those of the unit, in its order.
    """

    def __init__(self, number: int, size: int, parameters: Callable[[], Iterable[Parameter]]) -> None:
        self.number, self._size, self.parameters = number, size, parameters
        self._latest: tuple[object, Layout] = (None, Layout(number, ()))

    def reduced(self, owners: Sequence[int], numel: int) -> Layout:
        """What the parts of ``owners``, of ``numel`` elements each, consist of in a reduce-scatter.

        It is that of all parameters that have gradients; without names where these are not what is reduced, as with
        gradients of parameters that have been frozen since, or in steps that do not use some of them.
        """
        trained = tuple((name, shape) for name, shape, trains in self.parameters() if trains)
        key = (tuple(owners), numel, trained)
        if self._latest[0] != key:
            layout, found = self._of(trained, owners)
            if found != numel:
                layout = Layout.flat(len(owners) * numel, self.number)
            self._latest = (key, layout)
        return self._latest[1]

    def whole(self, owners: Sequence[int]) -> tuple[Layout, int]:
        """What parts with all parameters consist of, with gradients and without, and the elements of one part."""
        return self._of([(name, shape) for name, shape, _ in self.parameters()], owners)

    def _of(self, parameters: Sequence[tuple[str, torch.Size]], owners: Sequence[int]) -> tuple[Layout, int]:
        pieces, offset = [], 0
        for owner in owners:
            for name, shape in parameters:
                row, rows = math.prod(shape[1:]), -(-shape[0] // self._size)  # as torch.chunk
                low = min(rows * owner, shape[0])
                high = min(low + rows, shape[0])
                pieces.append(Piece(name, offset, low * row, (high - low) * row, 0))
                offset += rows * row
        return Layout(self.number, tuple(pieces)), offset // len(owners)
