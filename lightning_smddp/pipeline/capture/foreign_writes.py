"""Tensors that were there before a step, and that the step writes in place: in objects of the user's, or global ones.

Parameters and buffers are followed elsewhere, and copies stand in for tensors in the LightningModule's own attributes.
What else a step writes in place is written for each micro-batch, by each stage that comes there. So a trace notes it,
with what was in the memory before, and puts it back. What a step begins to write in mid-training is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_smddp._compat.torch import storage_key
from lightning_smddp._compat.torch_steps import storage_again
from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.pipeline.view.global_tensor import GlobalTensor


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
