"""What lies where in a gradient bucket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of ``dtype`` are summed: fp32 for 16-bit types, which are rounded once at the end."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


@dataclass(frozen=True)
class Piece:
    """A contiguous part of one parameter's gradient in a flat tensor.

    Attributes:
        name: the parameter's.
        offset: where it begins in the flat tensor, in elements.
        begin: which element of the flattened parameter comes first.
        numel: elements.
        row_length: elements of one row of the parameter as a matrix (its first dimension against all others);
            0 for parameters with fewer than two dimensions.
    """

    name: str
    offset: int
    begin: int
    numel: int
    row_length: int

    @property
    def end(self) -> int:
        """One beyond the last element of the flattened parameter."""
        return self.begin + self.numel

    def of(self, flat: Tensor) -> Tensor:
        """The view of this part in the flat tensor."""
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class Layout:
    """The pieces of a bucket, or of a shard of one.

    A checkpoint's layout is another thing (how ranks are arranged), and so are the pieces and slots of ``FlatLayout``,
    by which optimizers are sharded.

    ``slot`` is the bucket's number, the same on all ranks; None for a tensor that is reduced once.
    """

    slot: int | None
    pieces: tuple[Piece, ...]

    @classmethod
    def of_parameters(cls, slot: int, named: Iterable[tuple[str, Tensor]]) -> Layout:
        """DDP packs the gradients of a bucket's parameters one after the other."""
        pieces, offset = [], 0
        for name, parameter in named:
            numel = parameter.numel()
            row_length = 0
            if parameter.dim() >= 2 and numel:
                row_length = numel // parameter.shape[0]
            pieces.append(Piece(name, offset, 0, numel, row_length))
            offset += numel
        return cls(slot, tuple(pieces))

    @classmethod
    def flat(cls, numel: int, slot: int | None = None) -> Layout:
        """Of ``numel`` elements of which nothing is known: one piece without a name and without rows."""
        return cls(slot, (Piece("", 0, 0, numel, 0),))

    @cached_property
    def rows(self) -> list[int]:
        """Offsets at which a row of some parameter, or a parameter, begins."""
        starts: list[int] = []
        for piece in self.pieces:
            step = piece.row_length
            if step == 0:
                step = max(piece.numel, 1)  # one position, that of the parameter
            starts.extend(range(piece.offset, piece.offset + piece.numel, step))
        return starts

    def cut(self, low: int, high: int) -> Layout:
        """The layout of elements [low, high), offsets counted from ``low``."""
        pieces = []
        for piece in self.pieces:
            start = max(piece.offset, low)
            stop = min(piece.offset + piece.numel, high)
            if start < stop:
                begin = piece.begin + start - piece.offset
                pieces.append(Piece(piece.name, start - low, begin, stop - start, piece.row_length))
        return Layout(self.slot, tuple(pieces))
