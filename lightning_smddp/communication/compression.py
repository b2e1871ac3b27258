"""Lossy forms of gradients on the wire. Off by default: exact sums need no justification, lossy ones do.

Compression pays between nodes on links slower than some 10 Gbit/s; inside a node it costs more than it saves
(Agarwal et al., MLSys 2022, found it ahead of tuned exact sums in 6 of 200 data-center set-ups).

Here are the options, the codecs (how values look on the wire) and the memory of what was lost.
``Communicator._exchange`` chooses who sends them: ``RingExchange`` or ``BalancedExchange`` (``inter_node.py``), or
``PowerSGDExchange`` (``powersgd.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_smddp.communication.buckets import Layout
from lightning_smddp.wording import counted

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
            2019). Costs one more buffer of the size of this rank's shard of the gradients.
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
            raise ValueError(f"compression={self.method!r} is unknown. Valid: None, {_method_names()}.")
        if self.scope not in ("inter_node", "all"):
            raise ValueError(f"compression scope {self.scope!r} is unknown. Valid: 'inter_node', 'all'.")
        if self.block_size < 1 or self.rank < 1:
            raise ValueError(f"block_size={self.block_size} and rank={self.rank} have to be at least 1.")

    @classmethod
    def parse(cls, value: str | dict[str, Any] | Compression | None) -> Compression | None:
        """What users write (a method's name, the arguments as a mapping, an object, None) as an object.

        Raises:
            ValueError: it is none of these.
        """
        if value is None or isinstance(value, Compression):
            return value
        if isinstance(value, str):
            return cls(value)  # type: ignore[arg-type]  # checked in __post_init__
        try:
            return cls(**value)
        except TypeError as error:
            arguments = ", ".join([field.name for field in fields(cls)])
            raise ValueError(
                f"compression={value!r} does not describe a compression ({error}). Valid: None, {_method_names()}, "
                f"or the arguments of `Compression` ({arguments}), of which `method` is required."
            ) from error

    def codec(self) -> Codec | None:
        """The codec of this method; None for ``powersgd``, which compresses whole matrices."""
        if self.method == "int8":
            return Int8Codec(self.block_size)
        if self.method == "powersgd":
            return None
        return CastCodec(_CAST_TYPES[self.method])


def _method_names() -> str:
    return ", ".join([repr(method) for method in METHODS])


def check_compressible(dtype: torch.dtype, what: str) -> None:
    """Raise ``ValueError`` unless values of ``dtype`` can be compressed; ``what`` names them in the message."""
    if not dtype.is_floating_point:
        raise ValueError(
            f"{what} is of {dtype} and cannot be compressed: compression rounds, which only real floating-point "
            "values survive. Set `compression=None`, or make the values floating-point."
        )


class Codec(Protocol):
    """Encodes values for the wire, and decodes them again; what is lost is its rounding.

    If encoded values can be added up as they are, such as casts, ``RingExchange`` takes them; if only decoded ones can,
    ``BalancedExchange`` has to.
    """

    block_size: int

    def encode(self, tensor: Tensor) -> Tensor:
        """1-D ``tensor`` (a multiple of ``block_size`` long) in its form on the wire; ``tensor`` is not changed."""
        ...

    def decode(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The ``numel`` values of ``wire`` as ``dtype``."""
        ...

    def bytes_per_element(self, dtype: torch.dtype) -> float:
        """Size on the wire of one element of ``dtype``."""
        ...


class ExactCodec:
    """Values as they are, so that nothing is lost."""

    block_size = 1

    def encode(self, tensor: Tensor) -> Tensor:
        """See :meth:`Codec.encode`: ``tensor`` itself."""
        return tensor

    def decode(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Codec.decode`: a view."""
        return wire[:numel]

    def bytes_per_element(self, dtype: torch.dtype) -> float:
        """See :meth:`Codec.bytes_per_element`."""
        return dtype.itemsize


class CastCodec:
    """Values rounded to a 16-bit type. Finite values beyond the range of fp16 become its largest; inf and nan stay."""

    block_size = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, tensor: Tensor) -> Tensor:
        """See :meth:`Codec.encode`."""
        check_compressible(tensor.dtype, "a gradient")
        wire = tensor.to(self.dtype)
        if self.dtype != torch.float16:  # only fp16's range is much smaller than fp32's
            return wire
        limit = torch.finfo(self.dtype).max
        largest = tensor.clamp(-limit, limit).to(self.dtype)
        overflown = wire.isinf() & tensor.isfinite()
        return torch.where(overflown, largest, wire)

    def decode(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Codec.decode`."""
        return wire[:numel].to(dtype)

    def bytes_per_element(self, dtype: torch.dtype) -> float:
        """See :meth:`Codec.bytes_per_element`."""
        return self.dtype.itemsize


class Int8Codec:
    """Blocks of int8 values with one fp32 scale each: the block's largest magnitude is 127.

    On the wire: uint8, for each block 4 bytes of scale and ``block_size`` bytes of values. A block with an inf or
    nan decodes to nan.
    """

    def __init__(self, block_size: int = 256) -> None:
        self.block_size = block_size

    def encode(self, tensor: Tensor) -> Tensor:
        """See :meth:`Codec.encode`."""
        check_compressible(tensor.dtype, "a gradient")
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
        """See :meth:`Codec.decode`."""
        blocks = wire.view(-1, 4 + self.block_size)
        scale = blocks[:, :4].contiguous().view(torch.float32)
        values = blocks[:, 4:].contiguous().view(torch.int8).float()
        values = values.mul_(scale).flatten()
        return values[:numel].to(dtype)

    def bytes_per_element(self, dtype: torch.dtype) -> float:
        """See :meth:`Codec.bytes_per_element`."""
        return 1 + 4 / self.block_size


Parts = dict[str, list[tuple[int, Tensor]]]
"""Parts of flattened parameters by name, each with the number of its first element."""


def add_parts(flat: Tensor, layout: Layout, parts: Parts) -> None:
    """Add to ``flat``, which consists of ``layout``, what ``parts`` have of the same elements, in place."""
    for piece in layout.pieces:
        # Three ways to count: from the first element of the parameter (low, high), of the part, and of `flat`.
        #     parameter   |.....[ piece ..............].....|
        #     part        |..........[ values ...............]
        #     both        |..........[low ........high)
        for begin, values in parts.get(piece.name, ()):
            low = max(piece.begin, begin)
            high = min(piece.end, begin + values.numel())
            if low < high:
                common = values[low - begin : high - begin]
                start = piece.offset + low - piece.begin
                flat[start : start + common.numel()] += common.to(flat.device, flat.dtype)


def totals_of(parts: Parts, numels: Mapping[str, int]) -> dict[str, Tensor]:
    """What ``parts`` make up, for each parameter: fp32 of shape ``(numel,)``, on the CPU."""
    totals = {}
    for name, numel in numels.items():
        total = torch.zeros(numel)
        whole = Layout.of_parameters(0, [(name, total)])
        add_parts(total, whole, parts)
        totals[name] = total
    return totals


def require_same_sizes(state: Mapping[str, Tensor], numels: Mapping[str, int]) -> None:
    """Raise ``ValueError`` unless what is remembered, by parameter, has the sizes ``numels``."""
    for name, value in state.items():
        if value.numel() != numels.get(name):
            raise ValueError(
                f"The checkpoint's compression state for {name!r} has {counted(value.numel(), 'element')}, the "
                f"parameter has {numels.get(name)}. It belongs to another model."
            )


def collect_parts(parts: Parts, layout: Layout, flat: Tensor) -> None:
    """Add to ``parts`` what ``flat``, which consists of ``layout``, has of named parameters."""
    for piece in layout.pieces:
        if piece.name:
            parts.setdefault(piece.name, []).append((piece.begin, piece.of(flat)))


class ErrorFeedback:
    """Remembers what compression lost, for the next step.

    What matters is the sum over the ranks of what they hold for an element; which rank holds it does not. So the
    state is exported summed over ranks, by parameter, and restored under any other layout, number of ranks or nodes.

    Of each bucket (a layout's ``slot``) it holds one residual, as long as this rank's shard of the bucket. A step first
    adds it to the shard (:meth:`add_to`), which makes it on the way, then writes what is lost now over it
    (:meth:`remember`).

    Attributes:
        restored: what was restored, without what was taken from it as a whole.
    """

    def __init__(self) -> None:
        self._residuals: dict[int | None, tuple[Layout, Tensor]] = {}
        self.restored: Parts = {}

    def add_to(self, shard: Tensor, layout: Layout) -> None:
        """Add what is remembered for ``layout`` to ``shard``, in place."""
        shard.add_(self._residual(shard, layout))

    def remember(self, values: Tensor, sent: Tensor, layout: Layout, low: int = 0) -> None:
        """``sent`` went out for ``values``, the shard's elements from ``low`` on: remember the difference.

        What is not finite is forgotten.
        """
        _, residual = self._residuals[layout.slot]
        own = residual[low : low + values.numel()]
        torch.sub(values, sent, out=own)
        own.nan_to_num_(0, 0, 0)

    def remember_more(self, total: Tensor, sent: Tensor, layout: Layout, low: int) -> None:
        """As :meth:`remember`, in addition to what is remembered already."""
        _, residual = self._residuals[layout.slot]
        lost = total - sent
        lost.nan_to_num_(0, 0, 0)
        residual[low : low + lost.numel()].add_(lost)

    def forget_restored(self) -> None:
        """Every bucket has taken its part of what was restored."""
        self.restored = {}

    def parts(self) -> Parts:
        """What this rank remembers of the steps that it has seen."""
        parts: Parts = {}
        for layout, residual in self._residuals.values():
            collect_parts(parts, layout, residual)
        return parts

    def totals(self, numels: dict[str, int]) -> dict[str, Tensor]:
        """What this rank remembers, for each parameter: fp32 of shape ``(numel,)``."""
        return totals_of(self.parts(), numels)

    def restore(self, totals: dict[str, Tensor], members: int) -> None:
        """Start from ``totals`` over all ranks, of which each of the ``members`` of an exchange takes a share."""
        parts: Parts = {}
        for name, total in totals.items():
            parts[name] = [(0, total / members)]
        self.restore_parts(parts)

    def restore_parts(self, parts: Parts) -> None:
        """Start from ``parts``, which are no other rank's."""
        self._residuals.clear()
        self.restored = parts

    def _residual(self, shard: Tensor, layout: Layout) -> Tensor:
        """What is remembered for ``layout``, as long as ``shard``: zeros at the first call, but for what came before.

        That is what was remembered under this slot when the bucket had other parameters, and what was restored.
        """
        before: Parts = {}
        if layout.slot in self._residuals:
            known_layout, known = self._residuals[layout.slot]
            same_values = known.numel() == shard.numel() and known.dtype == shard.dtype
            if same_values and known_layout == layout:
                return known
            collect_parts(before, known_layout, known)
        residual = torch.zeros_like(shard)
        add_parts(residual, layout, before)
        add_parts(residual, layout, self.restored)
        self._forget_taken(layout)
        self._residuals[layout.slot] = (layout, residual)
        return residual

    def _forget_taken(self, layout: Layout) -> None:
        """What was restored and is in ``layout`` as a whole is not taken once more, when the layout has changed."""
        for piece in layout.pieces:
            if piece.name not in self.restored:
                continue
            left = []
            for begin, values in self.restored[piece.name]:
                end = begin + values.numel()
                if begin < piece.begin or end > piece.end:
                    left.append((begin, values))
            self.restored[piece.name] = left
