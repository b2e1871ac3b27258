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
        self.number = number
        self.parameters = parameters
        self._size = size
        # A unit's reductions mostly consist of the same as in the step before: the last answer, and what it was for.
        self._latest_key: object = None
        self._latest = Layout(number, ())

    def reduced(self, owners: Sequence[int], numel: int) -> Layout:
        """What the parts of ``owners``, of ``numel`` elements each, consist of in a reduce-scatter.

        It is that of all parameters that have gradients; without names where these are not what is reduced, as with
        gradients of parameters that have been frozen since, or in steps that do not use some of them.
        """
        trained = []
        for name, shape, trains in self.parameters():
            if trains:
                trained.append((name, shape))
        key = (tuple(owners), numel, trained)
        if self._latest_key != key:
            layout, found = self._of(trained, owners)
            if found != numel:
                layout = Layout.flat(len(owners) * numel, self.number)
            self._latest_key = key
            self._latest = layout
        return self._latest

    def whole(self, owners: Sequence[int]) -> tuple[Layout, int]:
        """What parts with all parameters consist of, with gradients and without, and the elements of one part."""
        parameters = [(name, shape) for name, shape, _ in self.parameters()]
        return self._of(parameters, owners)

    def _of(self, parameters: Sequence[tuple[str, torch.Size]], owners: Sequence[int]) -> tuple[Layout, int]:
        # With 5 rows on 4 ranks, each has room for 2 rows of every parameter: the ranks have 2, 2, 1 and 0 of them. The
        # padding behind these belongs to no piece.
        pieces = []
        offset = 0
        for owner in owners:
            for name, shape in parameters:
                row_length = math.prod(shape[1:])
                rows = -(-shape[0] // self._size)  # rounded up, as torch.chunk does
                low = min(rows * owner, shape[0])
                high = min(low + rows, shape[0])
                numel = (high - low) * row_length
                pieces.append(Piece(name, offset, low * row_length, numel, 0))
                offset += rows * row_length
        layout = Layout(self.number, tuple(pieces))
        return layout, offset // len(owners)
