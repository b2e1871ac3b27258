"""Ranks that compute the same thing: they begin each step with the same random numbers, and cannot drift unseen."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.resume.random_states import RandomStates, from_plain, to_plain
from lightning_smddp.resume.rank_states import pack, unpack
from lightning_smddp.wire.stream import CPU

_WITNESSES = 8  # parameters whose values are looked at: the smallest
_ROUNDING = 1e-2  # relative differences of losses that the order of additions on a GPU explains


class DriftError(RuntimeError):
    """Ranks that should compute the same thing do not."""


class SameRanks:
    """Holds the ranks of ``group`` together, with one message of a few numbers each step.

    Args:
        module: whole on each rank.
        group: the ranks that all run the whole step.
        device: where ``group``'s collectives take their tensors from.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.module, self.group, self.device = module, group, device
        self._states = RandomStates(device)
        self._loss = 0.0
        self._place = ""  # of the step that it is the loss of

    def begin(self) -> None:
        """Before a step: compare what the last one has come to, and random numbers. Collective.

        Where random numbers differ, all ranks go on with those of the first.

        Raises:
            DriftError: on every rank.
        """
        mine = torch.tensor([self._random_sum(), *_as_integers([self._loss, *self._witnesses()])], device=self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(everyones, mine, group=self.group)
        found = [part.tolist() for part in everyones]
        self._require_equal([_as_floats(part[1:]) for part in found])
        if any(part[0] != found[0][0] for part in found):
            self._share_random_numbers()

    def end(self, output: Any, place: str) -> None:
        """After the step called ``place``, which returned ``output``."""
        loss = output.get("loss") if isinstance(output, dict) else output
        self._loss = 0.0
        if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
            self._loss = float(loss.detach())
        self._place = place

    def _require_equal(self, everyones: Sequence[Sequence[float]]) -> None:
        first = everyones[0]
        for rank, values in enumerate(everyones):
            tolerance = 0.0 if self.device.type == "cpu" else _ROUNDING
            if _differ(values[0], first[0], tolerance):
                what = f"the loss of {self._place} is {values[0]!r} on rank {rank} of the pipeline and {first[0]!r} on"
            elif any(_differ(a, b, 0.0) for a, b in zip(values[1:], first[1:], strict=True)):
                what = f"behind {self._place or 'the start'} the parameters on rank {rank} of the pipeline differ from"
            else:
                continue
            raise DriftError(
                f"All ranks of the pipeline run the whole step on the same batch, but {what} rank 0. Something in the "
                "step or in a hook depends on the rank (`self.global_rank`, `is_global_zero`), on a random generator "
                "of its own, or on the time. Let it depend on the batch and on torch's, Python's or numpy's random "
                "numbers only."
            )

    def _witnesses(self) -> list[float]:
        parameters = sorted((p for p in self.module.parameters() if p.requires_grad), key=Tensor.numel)
        return [float(p.detach().double().sum()) for p in parameters[:_WITNESSES] if not p.is_complex()]

    def _random_sum(self) -> int:
        checksum = 0
        for name, state in to_plain(self._states.capture()).items():
            parts = state if isinstance(state, dict) else {"": state}
            for key, part in parts.items():
                data = part.numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode()
                checksum = zlib.crc32(f"{name}{key}".encode() + data, checksum)
        return checksum

    def _share_random_numbers(self) -> None:
        """All ranks go on with the random numbers of the first."""
        packed = pack(to_plain(self._states.capture()))
        length = torch.tensor([packed.numel()], device=self.device)
        dist.broadcast(length, group=self.group, group_src=0)
        if self.group.rank() != 0:
            packed = torch.empty(int(length), dtype=torch.uint8)
        packed = packed.to(self.device)
        dist.broadcast(packed, group=self.group, group_src=0)
        self._states.restore(from_plain(unpack(packed.to(CPU))))


def _differ(one: float, other: float, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) != math.isnan(other)
    if one == other:
        return False
    return not abs(one - other) <= tolerance * max(abs(one), abs(other))


def _as_integers(values: Sequence[float]) -> list[int]:
    """The bits of each value: a message of integers carries every value as it is."""
    return [struct.unpack("<q", struct.pack("<d", value))[0] for value in values]


def _as_floats(values: Sequence[int]) -> list[float]:
    return [struct.unpack("<d", struct.pack("<q", value))[0] for value in values]
