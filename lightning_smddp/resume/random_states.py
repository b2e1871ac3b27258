"""Random numbers of a run: the states of all their sources, as plain values for a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from lightning_smddp.seeding import Generators, is_generator, set_state, state_of

_DEPTH = 4  # of a sampler in a batch sampler in Lightning's wrapper, which has one in a dataset


class RandomStates:
    """Python's, numpy's and torch's random numbers, and those of generators that loaders keep.

    Args:
        device: this rank's, whose generator counts if it is a CUDA device.

    Attributes:
        of_loaders: the generators that they keep.
        pending: what a resumed run goes on from when it trains: until then loaders give nothing. None in other runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.pending: dict[str, Any] | None = None
        self._generators = Generators(torch.nn.Module(), device)
        self.of_loaders: list[Any] = []

    def look_into(self, thing: Any, depth: int = _DEPTH) -> None:
        """Find the generators among the attributes of a loader, and of samplers and datasets in it."""
        # In the order of names, so that each has the same place in the run that saves and in the one that resumes.
        for _, value in sorted(getattr(thing, "__dict__", {}).items()):
            if is_generator(value):
                self.of_loaders.append(value)
            elif isinstance(value, (Sampler, Dataset)) and depth:
                self.look_into(value, depth - 1)

    def capture(self) -> dict[str, Any]:
        """All states as they are: tensors, numbers, strings, and tuples, lists and dicts of them."""
        own = [_plain(state_of(generator)) for generator in self.of_loaders]
        return {"run": [_plain(state) for state in self._generators.states()], "loaders": own}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back a :meth:`capture`."""
        self._generators.restore(state["run"])
        for generator, own in zip(self.of_loaders, state["loaders"], strict=False):
            set_state(generator, own)


def _plain(state: Any) -> Any:
    """Lists for numpy's arrays, which it takes as well."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
