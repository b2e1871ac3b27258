"""What the host knows of a batch on a device, which it has copied there: so it need not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_smddp._compat.torch import CAST, DispatchMode, write_count

HostOf = Callable[[Tensor], "Tensor | None"]


@dataclass(frozen=True)
class _Copy:
    """A tensor on a device, what it was copied from, and how often each had been written then."""

    there: Tensor
    here: Tensor
    writes: tuple[int, int]

    def is_current(self) -> bool:
        return self.writes == (write_count(self.there), write_count(self.here))


class HostValues:
    """The copies of one batch, by the memory that they were made in."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around the code that moves a batch to the device. What was known of an earlier batch is forgotten."""
        self.forget()
        with _Watch(self):
            yield

    def forget(self) -> None:
        """Copies are of a batch that is worked on no more."""
        self._copies.clear()

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of ``tensor``, or of a view of one that was copied, on the host; None if they are not known."""
        if tensor.device.type in ("cpu", "meta"):
            return tensor
        if not _is_plain(tensor):
            return None
        # Found by memory, so a view of the copy is found too: it has the same strides on the host, and lies as far
        # from the original's beginning. A write to either side since then makes the copy worthless.
        copy = self._copies.get(_memory(tensor))
        if copy is None or tensor.dtype != copy.there.dtype or not copy.is_current():
            return None
        distance = tensor.storage_offset() - copy.there.storage_offset()
        offset = copy.here.storage_offset() + distance
        return copy.here.detach().as_strided(tensor.shape, tensor.stride(), offset)

    def note_copy(self, here: Any, there: Any) -> None:
        """``there`` was made of ``here``, maybe on another device."""
        if not isinstance(here, Tensor) or not _is_plain(here):
            return
        if not isinstance(there, Tensor) or not _is_plain(there):
            return
        if here.device.type != "cpu" or there.device.type == "cpu":
            return
        # With the same type and strides an element of a view lies as far from the beginning on both sides, so that
        # views are found too. A cast or a change of layout on the way is no copy in this sense.
        if here.dtype == there.dtype and here.stride() == there.stride():
            writes = (write_count(there), write_count(here))
            self._copies[_memory(there)] = _Copy(there, here, writes)

    def note_write(self, tensor: Any) -> None:
        """``tensor`` is written in place."""
        if isinstance(tensor, Tensor) and _is_plain(tensor):
            self._copies.pop(_memory(tensor), None)


class _Watch(DispatchMode):
    """Tells :class:`HostValues` of each operator below autograd."""

    def __init__(self, values: HostValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A copy to a device is a cast here, also `.to(device)` and `.cuda()`; all else matters only if it writes.
        result = function(*args, **(kwargs or {}))
        if function is CAST:
            self._values.note_copy(args[0], result)
        elif function._schema.is_mutable:
            for leaf in args:
                self._values.note_write(leaf)
        return result


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has memory of its own with strides, and counts what is written to it."""
    if tensor.is_inference() or tensor.is_nested or tensor.is_meta:
        return False
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a wrapper of other tensors
        return False
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
