"""Lossy forms of gradients on the wire. Off by default: exact sums need no justification, lossy ones do.

Compression pays between nodes on links slower than some 10 Gbit/s; inside a node it costs more than it saves
(Agarwal et al., MLSys 2022, found it ahead of tuned exact sums in 6 of 200 data-center set-ups).

Here are the options, the codecs (how values look on the wire) and the memory of what was lost.
``Communicator._exchange`` chooses who sends them: ``RingExchange`` or ``BalancedExchange`` (``inter_node.py``).
``PowerSGD`` (``powersgd.py``) does all of it by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Method = Literal["bf16", "fp16", "int8", "powersgd"]
METHODS: tuple[str, ...] = get_args(Method)
_CAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed.

    Args:
        method: ``"bf16"`` or ``"fp16"`` (half the bytes of fp32), ``"int8"`` (a quarter; one scale for each block),
            or ``"powersgd"`` (low rank; Vogels et al., NeurIPS 2019).
        scope: ``"inter_node"`` compresses what goes between nodes; ``"all"`` also what stays inside one, in which
            case the reduction is flat.
        error_feedback: add what compression lost in one step to the next step's gradient (Karimireddy et al., ICML
            2019). Costs one more buffer of the size of this rank's shard of the gradients, with ``powersgd`` of all.
        block_size: elements that share a scale, for ``int8``.
        rank: of the approximation, for ``powersgd``.

    Raises:
        ValueError: unknown method or scope, or a size below 1.
    """

    method: Method
    scope: Literal["inter_node", "all"] = "inter_node"
    error_feedback: bool = True
    block_size: int = 256
    rank: int = 4

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"compression={self.method!r} is unknown. Valid: None, or one of {METHODS}.")
        if self.scope not in ("inter_node", "all"):
            raise ValueError(f"compression scope {self.scope!r} is unknown. Valid: 'inter_node', 'all'.")
        if self.block_size < 1 or self.rank < 1:
            raise ValueError(f"block_size={self.block_size} and rank={self.rank} have to be at least 1.")

    @classmethod
    def parse(cls, value: str | dict[str, Any] | Compression | None) -> Compression | None:
        """What users write (a method's name, the arguments as a mapping, an object, None) as an object.

        Raises:
            ValueError, TypeError: it is none of these.
        """
        if value is None or isinstance(value, Compression):
            return value
        if isinstance(value, str):
            return cls(value)  # type: ignore[arg-type]  # checked in __post_init__
        return cls(**value)

    def codec(self) -> Codec:
        """The codec of this method, which is not ``powersgd``: that compresses whole matrices."""
        if self.method == "int8":
            return Int8Codec(self.block_size)
        return CastCodec(_CAST_TYPES[self.method])


class ExactCodec:
    """Values as they are, so that nothing is lost."""

    block_size = 1
    itemsize = float("inf")  # bytes of an element on the wire: not less than it has

    def encode(self, tensor: Tensor) -> Tensor:
        """1-D ``tensor`` (a multiple of ``block_size`` long) in its form on the wire; ``tensor`` is not changed."""
        return tensor

    def decode(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The ``numel`` values of ``wire`` as ``dtype``."""
        return wire[:numel]


class CastCodec:
    """Values rounded to a 16-bit type. Finite values beyond the range of fp16 become its largest; inf and nan stay."""

    block_size = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.itemsize: float = dtype.itemsize

    def encode(self, tensor: Tensor) -> Tensor:
        """See :meth:`ExactCodec.encode`."""
        if self.dtype == torch.float16:  # only its range is much smaller than fp32's
            limit = torch.finfo(self.dtype).max
            tensor = torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit))
        return tensor.to(self.dtype)

    def decode(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`ExactCodec.decode`."""
        return wire[:numel].to(dtype)


class Int8Codec:
    """Blocks of int8 values with one fp32 scale each: the block's largest magnitude is 127.

    On the wire: uint8, for each block 4 bytes of scale and ``block_size`` bytes of values. A block with an inf or
    nan decodes to nan.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.itemsize = 1 + 4 / block_size

    def encode(self, tensor: Tensor) -> Tensor:
        """See :meth:`ExactCodec.encode`."""
        blocks = tensor.float().view(-1, self.block_size)
        magnitudes = blocks.abs().amax(1, keepdim=True)
        scale = magnitudes / 127
        # A block of zeros has a scale of 0, by which nothing can be divided. One with an inf or nan has a scale that is
        # not finite: its steps are 0, and 0 times that scale decodes to nan.
        steps = torch.where(scale > 0, blocks / scale, 0)
        steps = steps.round_().clamp_(-127, 127).nan_to_num_(0, 0, 0)
        # A row is a block: | scale, 4 bytes | a step of each element, 1 byte each |
        wire = torch.empty(len(blocks), 4 + self.block_size, dtype=torch.uint8, device=tensor.device)
        wire[:, :4] = scale.view(torch.uint8)
        wire[:, 4:] = steps.to(torch.int8).view(torch.uint8)
        return wire.flatten()

    def decode(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`ExactCodec.decode`."""
        blocks = wire.view(-1, 4 + self.block_size)
        scale = blocks[:, :4].contiguous().view(torch.float32)
        values = blocks[:, 4:].contiguous().view(torch.int8).float()
        values = values.mul_(scale).flatten()
        return values[:numel].to(dtype)


Codec = ExactCodec | CastCodec | Int8Codec
"""Encodes values for the wire, and decodes them again; what is lost is its rounding.

If encoded values can be added up as they are, such as casts, ``RingExchange`` takes them; if only decoded ones can,
``BalancedExchange`` has to.
"""


class ErrorFeedback:
    """Remembers what compression lost of each bucket on this rank, for the next step.

    Of each bucket (``slot``) it holds one residual, as long as this rank's shard of the bucket. A step first adds it to
    the shard (:meth:`add_to`), then writes what is lost now over it (:meth:`remember`).
    """

    def __init__(self) -> None:
        self._parameters: dict[int, list[int]] = {}  # of each bucket, by `id`
        self._residuals: dict[int, Tensor] = {}

    def begin(self, slot: int, parameters: list[int]) -> None:
        """Bucket ``slot`` has these ``parameters``: if it had others, what was remembered of it is nobody's."""
        if self._parameters.get(slot) != parameters:
            self._parameters[slot] = parameters
            self._residuals.pop(slot, None)

    def forget(self) -> None:
        """Begin with nothing remembered."""
        self._residuals.clear()

    def add_to(self, shard: Tensor, slot: int) -> None:
        """Add what is remembered to ``shard``, in place."""
        if slot not in self._residuals:
            self._residuals[slot] = torch.zeros_like(shard)
        shard.add_(self._residuals[slot])

    def remember(self, values: Tensor, sent: Tensor, slot: int, low: int = 0) -> None:
        """``sent`` went out for ``values``, the shard's elements from ``low`` on: remember the difference alone.

        What is not finite is forgotten.
        """
        own = self._residuals[slot][low : low + values.numel()]
        torch.sub(values, sent, out=own)  # in place: memory for a difference as large as a shard costs more than it
        own.nan_to_num_(0, 0, 0)

    def remember_more(self, total: Tensor, sent: Tensor, slot: int, low: int) -> None:
        """As :meth:`remember`, in addition to what is remembered already."""
        lost = (total - sent).nan_to_num_(0, 0, 0)
        self._residuals[slot][low : low + lost.numel()].add_(lost)
