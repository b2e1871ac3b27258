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
        # Each matrix M becomes P Q^T. With Q of the last step: P = sum of M Q, made orthonormal; Q = sum of M^T P.
        matrices = [piece for piece in layout.pieces if self._shrinks(piece)]
        exact = [piece for piece in layout.pieces if not self._shrinks(piece)]
        left = [_matrix(shard, piece).float() @ self._factor(piece, shard.device) for piece in matrices]
        sent = _pack([*left, *(_flat(shard, piece).float() for piece in exact)], shard)
        work = dist.all_reduce(sent, group=self.factor_group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            sizes = [tensor.numel() for tensor in left] + [piece.numel for piece in exact]
            summed = sent.split(sizes)
            bases = [torch.linalg.qr(flat.view(p.shape))[0] for flat, p in zip(summed, left, strict=False)]
            right = [_matrix(shard, piece).float().T @ base for piece, base in zip(matrices, bases, strict=True)]
            answer = _pack(right, shard)
            if matrices:
                dist.all_reduce(answer, group=self.answer_group)
            result = torch.zeros_like(shard)
            parts = answer.split([q.numel() for q in right])
            for piece, base, q, flat in zip(matrices, bases, right, parts, strict=False):
                self.factors[_key(piece)] = flat.view(q.shape).nan_to_num(0, 0, 0)  # else nan would stay for good
                _matrix(result, piece).copy_(base @ flat.view(q.shape).T)
            for piece, flat in zip(exact, summed[len(left) :], strict=True):
                _flat(result, piece).copy_(flat)
            if self.feedback is not None:
                self._remember(shard, result, matrices, layout)
            shard.copy_(result)

        return finish

    def wire_bytes(self, numel: int, dtype: torch.dtype, layout: Layout | None = None) -> int:
        """Bytes that this rank sends for a shard, by a ring each for P and Q."""
        size = dist.get_world_size(self.factor_group)
        elements = 0
        assert layout is not None
        for piece in layout.pieces:
            if self._shrinks(piece):
                elements += self._factor_elements(piece)
            else:
                elements += piece.numel
        return int(2 * 4 * elements * (size - 1) / size)

    def _remember(self, shard: Tensor, result: Tensor, matrices: list[Piece], layout: Layout) -> None:
        """This rank's share of the error: its own matrix less its share of the common approximation."""
        assert self.feedback is not None
        sent = shard.clone()
        for piece in matrices:
            _flat(sent, piece).copy_(_flat(result, piece)).div_(dist.get_world_size(self.factor_group))
        self.feedback.remember(shard, sent, layout)

    def _shrinks(self, piece: Piece) -> bool:
        if not piece.row_length or piece.begin % piece.row_length or piece.numel % piece.row_length:
            return False
        return self._factor_elements(piece) * _LEAST_GAIN <= piece.numel

    def _factor_elements(self, piece: Piece) -> int:
        """Of P (rows x rank) and Q (columns x rank) together."""
        rows = piece.numel // piece.row_length
        return self.rank * (rows + piece.row_length)

    def _factor(self, piece: Piece, device: torch.device) -> Tensor:
        """Q of the last step (warm start), else the same random one on every rank."""
        known = self.factors.get(_key(piece))
        if known is not None and known.shape == (piece.row_length, self.rank):
            return known.to(device)
        generator = torch.Generator().manual_seed(zlib.crc32(_key(piece).encode()))
        return torch.randn(piece.row_length, self.rank, generator=generator).to(device)


def _key(piece: Piece) -> str:
    return f"{piece.name}[{piece.begin}:{piece.begin + piece.numel}]"


def _flat(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor[piece.offset : piece.offset + piece.numel]


def _matrix(tensor: Tensor, piece: Piece) -> Tensor:
    return _flat(tensor, piece).view(-1, piece.row_length)


def _pack(tensors: list[Tensor], like: Tensor) -> Tensor:
    if not tensors:
        return torch.empty(0, device=like.device)
    return torch.cat([tensor.flatten() for tensor in tensors])
