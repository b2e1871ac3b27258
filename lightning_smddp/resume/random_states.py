"""Random numbers of a run: the states of all their sources, as plain values for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
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
        pending: what a resumed run goes on from as soon as it trains; None from then on, and in other runs.
        waiting: make the iterators of a resumed run's loaders.
    """

    def __init__(self, device: torch.device) -> None:
        self.pending: dict[str, Any] | None = None
        self.waiting: list[Callable[[], None]] = []
        self._generators = Generators(torch.nn.Module(), device)
        self._of_loaders: dict[str, Any] = {}

    def forget_loaders(self) -> None:
        """Their generators count no more."""
        self._of_loaders.clear()

    def look_into(self, thing: Any, place: str, depth: int = _DEPTH) -> None:
        """Find the generators among the attributes of a loader, and of samplers and datasets in it."""
        # In the order of names, so that each has the same place in the run that saves and in the one that resumes.
        for key, value in sorted(getattr(thing, "__dict__", {}).items()):
            if is_generator(value):
                self._of_loaders[f"{place}.{key}"] = value
            elif isinstance(value, (Sampler, Dataset)) and depth:
                self.look_into(value, f"{place}.{key}", depth - 1)

    def capture(self) -> dict[str, Any]:
        """All states as they are: tensors, numbers, strings, and tuples, lists and dicts of them."""
        own = {place: _plain(state_of(generator)) for place, generator in self._of_loaders.items()}
        return {"run": [_plain(state) for state in self._generators.states()], "loaders": own}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back a :meth:`capture`; generators of loaders that are not in it stay as they are."""
        self._generators.restore(state["run"])
        for place, generator in self._of_loaders.items():
            if place in state["loaders"]:
                set_state(generator, state["loaders"][place])

    def make_iterators(self) -> None:
        """Make those that are :attr:`waiting`, one after the other, as Lightning does at the begin of an epoch."""
        waiting, self.waiting = self.waiting, []
        if waiting and self.pending is not None:  # Lightning fetches ahead of loaders without length
            self.restore(self.pending)
        for make in waiting:
            make()

    def seed(self, number: int) -> None:
        """Let the run's numbers follow from ``number``; those of loaders stay as they are."""
        self._generators.seed(number)


def _plain(state: Any) -> Any:
    """Lists for numpy's arrays, which it takes as well."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
