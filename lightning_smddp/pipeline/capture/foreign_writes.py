"""Tensors that were there before a step, and that the step writes in place: in objects of the user's, or global ones.

Parameters and buffers are followed elsewhere, and copies stand in for tensors in the LightningModule's own attributes.
What else a step writes in place is written for each micro-batch, by each stage that comes there. So it is noted, with
what was in the memory before, and put back.

A trace sees all of it. Later a step may come for the first time to code that writes: operations in place are few, and
each is known by the lines of the user's code that lead to it. What new lines write is noted, and if it is still in use
when the batch is over, the step is traced again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_smddp._compat.torch import storage_key
from lightning_smddp._compat.torch_steps import storage_again
from lightning_smddp.pipeline.capture.ops import is_inplace, sets_flag
from lightning_smddp.pipeline.capture.user_code import Lines, user_lines, user_location
from lightning_smddp.pipeline.runtime.remote import RemoteTensor
from lightning_smddp.pipeline.view.tensor import GlobalTensor
from lightning_smddp.wire.pytree import leaves

NEW_WRITE = "The step writes a tensor in place"


@dataclass(frozen=True)
class _Before:
    """What was in a storage, and where in the user's code it was written then."""

    contents: torch.UntypedStorage
    location: str


class ForeignWrites:
    """Notes memory before it is written. It keeps none of it alive: what is gone with the step was the step's own."""

    def __init__(self) -> None:
        self._before: dict[StorageWeakRef, _Before] = {}

    def note(self, tensor: Tensor) -> None:
        """``tensor`` is about to be written by the user's code."""
        key = storage_key(tensor)
        if key is None or key in self._before:
            return
        if tensor.is_meta or isinstance(tensor, (RemoteTensor, GlobalTensor)):
            return
        # Whether the memory was the step's own is known only when the step is over: then what was its own is gone.
        # Until then a copy is kept of each storage that is written, by a key that keeps none of them alive.
        contents = tensor.untyped_storage().clone()
        self._before[key] = _Before(contents, user_location())

    def locations(self) -> list[str]:
        """Where memory was written first (``file:line``) that is still in use: asked when the step is over."""
        locations = []
        for key, before in self._before.items():
            if storage_again(key) is not None:
                locations.append(before.location)
        return locations

    def put_back(self) -> None:
        """What was noted is as it was before. Nothing is noted any more."""
        for key, before in self._before.items():
            storage = storage_again(key)
            if storage is not None and storage.nbytes() == before.contents.nbytes():
                storage.copy_(before.contents)
        self._before.clear()


def written_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a torch function writes in place, as far as its name and ``out`` say so."""
    if is_inplace(function) and not sets_flag(function):
        return leaves(args[:1])
    if kwargs and "out" in kwargs:
        return leaves(kwargs["out"])
    return []


class NewWrites:
    """Notes what steps write from lines that no trace has seen write.

    Attributes:
        known: those that traces have seen.
        index: of the micro-batch that runs.
    """

    def __init__(self) -> None:
        self.known: set[Lines] = set()
        self.index = 0
        self._lines: dict[Lines, int] = {}  # new ones, and the first micro-batch that came there
        self._foreign = ForeignWrites()

    def look(self, written: list[Any], is_followed: Callable[[Tensor], bool]) -> None:
        """The user's code is about to write these; ``is_followed`` says for which that is no matter."""
        # Lines first: nearly always they are known, and then nothing else costs time.
        lines = user_lines()
        if lines in self.known:
            return
        for tensor in written:
            if not isinstance(tensor, Tensor) or tensor.grad_fn is not None:  # a part of this step's graph
                continue
            if not is_followed(tensor):
                self._lines.setdefault(lines, self.index)
                self._foreign.note(tensor)

    def found(self) -> dict[int, str]:
        """By micro-batch, what has been written and is still in use; if there is nothing, the new lines are known."""
        if not self._lines:
            return {}
        locations = self._foreign.locations()
        if locations:
            first = min(self._lines.values())
            return {first: f"{NEW_WRITE} at {locations[0]} that was kept, for the first time."}
        self.known |= self._lines.keys()
        self._lines = {}
        self._foreign = ForeignWrites()
        return {}

    def put_back(self) -> None:
        """Undo what has been written from new lines."""
        self._foreign.put_back()
        self._lines = {}
