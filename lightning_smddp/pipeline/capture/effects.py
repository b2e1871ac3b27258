"""What an operation has changed: told by looking before it and behind it, whatever it is called."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.ops import is_inplace
from lightning_smddp.pipeline.runtime.draws import generator_states

Version: TypeAlias = int | Tensor


class Effects:
    """How things were before an operation: versions of its tensors, and states of the generators that it may draw from.

    Args:
        arguments: all leaves of its arguments.
        given: the tensors among them that it may read or write.
        buffers: identities of the module's buffers.
        device: whose default generator it may draw from, beside the CPU's.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        given: Sequence[Tensor],
        buffers: Container[int],
        device: torch.device,
    ) -> None:
        # A name says little of what is written: `F.batch_norm` writes running averages. So we look.
        self._given = given
        self._buffers = buffers
        self._device = device
        self._generators = [leaf for leaf in arguments if isinstance(leaf, torch.Generator)]
        self._versions = [self._version(tensor) for tensor in given]
        self._states = self._random_states()

    def changed(self, function: Any, args: Sequence[Any]) -> list[Tensor]:
        """The tensors that ``function``, called with ``args``, has written in place."""
        changed = []
        for tensor, before in zip(self._given, self._versions, strict=True):
            if not _equal(self._version(tensor), before):
                changed.append(tensor)
        if args and is_inplace(function):
            return _with_target(changed, args[0])
        return changed

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn: a generator is not where it was."""
        return not all(map(torch.equal, self._states, self._random_states()))

    def _version(self, tensor: Tensor) -> Version:
        """What differs after a change in place: for buffers the contents, as ``batch_norm`` counts no version."""
        if id(tensor) in self._buffers:
            return tensor.clone()
        if tensor.is_inference():
            return -1
        return tensor._version

    def _random_states(self) -> list[Tensor]:
        """Of torch's default generators, the CPU's first, and of those among the arguments."""
        own = [generator.get_state() for generator in self._generators]
        return generator_states(self._device) + own


def _equal(one: Version, other: Version) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _with_target(changed: list[Tensor], target: Any) -> list[Tensor]:
    """``changed``, and what an operation in place is called for, where no version was counted."""
    if isinstance(target, Tensor):
        if any(tensor is target for tensor in changed):
            return changed
        return [*changed, target]
    if isinstance(target, (list, tuple)) and not changed:  # `torch._foreach_mul_`
        return [tensor for tensor in target if isinstance(tensor, Tensor)]
    return changed
