"""PowerSGD between nodes: matrices travel as two thin factors (Vogels et al., NeurIPS 2019).

torch's own PowerSGD hook works on whole DDP buckets over one flat group. Here the matrices are the rows of each
parameter that a rank owns inside its node, so that all local ranks compress and send in parallel, and the state
(factors and remembered error) can be saved and restored.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.buckets import Layout, Piece
from lightning_smddp.communication.compression import ErrorFeedback

_LEAST_GAIN = 2  # matrices that would shrink by less than this factor travel as they are


class PowerSGDExchange:
    """Sums a shard's matrices over the group, each as an approximation of low rank; all else is summed in fp32.

    Args:
        factor_group: carries the left factors P.
        answer_group: a second group of the same ranks; carries the right factors Q.
        rank: of the approximation.
        feedback: remembers the error, or None.
    """

    def __init__(
        self,
        factor_group: dist.ProcessGroup,
        answer_group: dist.ProcessGroup,
        rank: int,
        feedback: ErrorFeedback | None,
    ) -> None:
        self.factor_group, self.answer_group = factor_group, answer_group
        self.rank, self.feedback = rank, feedback
        self.factors: dict[str, Tensor] = {}  # Q of the last step, by name of its piece

    def start(self, shard: Tensor, layout: Layout) -> Callable[[], object]:
        """See ``InterNodeReduce.start``."""
        if self.feedback is not None:
            self.feedback.add_to(shard, layout)
        matrices = [piece for piece in layout.pieces if self._shrinks(piece)]
        exact = [piece for piece in layout.pieces if not self._shrinks(piece)]
        # Each matrix M becomes P Q^T. With Q of the last step: P = sum of M Q, made orthonormal; Q = sum of M^T P.
        # Two messages, one after the other, as P has to be whole before Q can be computed from it:
        #     sent:    | M Q of matrix 0 | M Q of matrix 1 | ... | exact piece | exact piece | ...
        #     answer:  | M^T P of matrix 0 | M^T P of matrix 1 | ...
        to_sum = []
        for piece in matrices:
            factor = self._factor(piece, shard.device)
            to_sum.append(_matrix(shard, piece).float() @ factor)
        for piece in exact:
            to_sum.append(piece.of(shard).float())
        sent = _pack(to_sum, shard)
        shapes = [tensor.shape for tensor in to_sum]
        work = dist.all_reduce(sent, group=self.factor_group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            summed = _unpack(sent, shapes)
            bases = []
            right = []
            for piece, left in zip(matrices, summed, strict=False):
                basis, _ = torch.linalg.qr(left)
                bases.append(basis)
                right.append(_matrix(shard, piece).float().T @ basis)
            answer = _pack(right, shard)
            if matrices:
                dist.all_reduce(answer, group=self.answer_group)
            result = torch.zeros_like(shard)
            factors = _unpack(answer, [tensor.shape for tensor in right])
            for piece, basis, factor in zip(matrices, bases, factors, strict=True):
                # The next step starts from the factor: nan would stay for good. This step's result keeps it.
                self.factors[_key(piece)] = factor.nan_to_num(0, 0, 0)
                _matrix(result, piece).copy_(basis @ factor.T)
            for piece, values in zip(exact, summed[len(matrices) :], strict=True):
                piece.of(result).copy_(values)
            if self.feedback is not None:
                self._remember(shard, result, matrices, layout)
            shard.copy_(result)

        return finish

    def wire_bytes(self, numel: int, dtype: torch.dtype, layout: Layout | None = None) -> int:
        """Bytes that this rank sends for a shard, by a ring each for P and Q."""
        assert layout is not None
        size = dist.get_world_size(self.factor_group)
        elements = 0
        for piece in layout.pieces:
            if self._shrinks(piece):
                elements += self._factor_elements(piece)
            else:
                elements += piece.numel
        nbytes = elements * 4  # both factors and exact values travel in fp32
        return int(2 * nbytes * (size - 1) / size)

    def _remember(self, shard: Tensor, result: Tensor, matrices: list[Piece], layout: Layout) -> None:
        """This rank's share of the error: its own matrix less its share of the common approximation."""
        assert self.feedback is not None
        size = dist.get_world_size(self.factor_group)
        sent = shard.clone()
        for piece in matrices:
            share = piece.of(sent)
            share.copy_(piece.of(result))
            share.div_(size)
        self.feedback.remember(shard, sent, layout)

    def _shrinks(self, piece: Piece) -> bool:
        if piece.row_length == 0:
            return False
        if piece.begin % piece.row_length or piece.numel % piece.row_length:  # a shard's bounds cut a row
            return False
        return self._factor_elements(piece) * _LEAST_GAIN <= piece.numel

    def _factor_elements(self, piece: Piece) -> int:
        """Of P (rows x rank) and Q (columns x rank) together."""
        rows = piece.numel // piece.row_length
        return self.rank * (rows + piece.row_length)

    def _factor(self, piece: Piece, device: torch.device) -> Tensor:
        """Q of the last step (warm start), else the same random one on every rank."""
        key = _key(piece)
        shape = (piece.row_length, self.rank)
        known = self.factors.get(key)
        if known is not None and known.shape == shape:
            return known.to(device)
        # Made on the CPU from the piece's name, so that ranks agree without a message, on any device.
        seed = zlib.crc32(key.encode())
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(device)


def _key(piece: Piece) -> str:
    return f"{piece.name}[{piece.begin}:{piece.end}]"


def _matrix(tensor: Tensor, piece: Piece) -> Tensor:
    """The view of a piece of whole rows as (rows, columns)."""
    return piece.of(tensor).view(-1, piece.row_length)


def _pack(tensors: list[Tensor], like: Tensor) -> Tensor:
    """One flat tensor of all values, on the device of ``like``."""
    if not tensors:
        return torch.empty(0, device=like.device)
    return torch.cat([tensor.flatten() for tensor in tensors])


def _unpack(packed: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """The inverse of :func:`_pack`, as views."""
    sizes = [shape.numel() for shape in shapes]
    views = []
    for flat, shape in zip(packed.split(sizes), shapes, strict=True):
        views.append(flat.view(shape))
    return views
