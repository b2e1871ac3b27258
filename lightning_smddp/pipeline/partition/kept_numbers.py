"""Numbers that modules keep and a step may work with where nobody looks: attributes, and tensors of one element.

A schedule sets ``module.beta``, or fills a buffer with the weight of a term. What modules do with it inside is not
seen, but the number is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import write_count
from lightning_smddp._compat.torch_steps import registered_buffers
from lightning_smddp.pipeline.partition.magnitudes import KnownMagnitudes, Magnitudes, is_number, magnitude


class KeptNumbers:
    """Those of ``modules``, looked at before each batch of a step.

    To compare what is the same object as before takes about 0.05 us each; a tensor is read when it was written.

    Args:
        modules: with the numbers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._known = KnownMagnitudes()
        self._kept: list[tuple[dict[str, Any], str]] = []
        for module in modules:
            containers = [vars(module)]
            if not isinstance(module, torch.jit.ScriptModule):
                containers.append(registered_buffers(module))
            for own in containers:
                self._kept += [(own, name) for name, value in own.items() if is_number(value) or _is_scalar(value)]
        self._last: list[Any] = [None] * len(self._kept)
        self._written: list[int] = [-1] * len(self._kept)
        self._found: Magnitudes = {}
        self.is_new()
        self.accept()

    def is_new(self) -> bool:
        """Whether one has another order of magnitude than ever."""
        for index, value in self._changed():
            if isinstance(value, Tensor):
                value = value.item()
            self._found[index] = [(magnitude(value),)]
        return bool(self._found) and self._known.is_new(self._found)

    def accept(self) -> None:
        """What was found is known from here on."""
        if self._found:
            self._known.accept([self._found])
        self._found = {}

    def _changed(self) -> Iterator[tuple[int, Any]]:
        """Numbers that are others than when this was asked."""
        for index, (own, name) in enumerate(self._kept):
            value: Any = own.get(name)
            is_same_object = value is self._last[index]
            was_scalar = self._written[index] >= 0
            if is_same_object and not (was_scalar and write_count(value) != self._written[index]):
                continue
            self._last[index], self._written[index] = value, -1
            if _is_scalar(value):
                self._written[index] = write_count(value)
                yield index, value
            elif is_number(value):
                yield index, value


def _is_scalar(value: Any) -> bool:
    """Whether it is a tensor that may be the weight of a term, with a value here."""
    if not isinstance(value, Tensor) or value.requires_grad or value.is_meta or value.is_inference():
        return False
    return value.numel() == 1 and value.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
