"""States of random numbers: read, put back, and written as what a checkpoint may hold.

A *source* is anything that draws random numbers and can be put back: the generators of the process (Python's, numpy's,
torch's, that of this rank's device), and those that a data loader's sampler or dataset keeps for itself.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

_OWN = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_DEPTH = 4  # of a sampler in a batch sampler in Lightning's wrapper, which has one in a dataset


class RandomStates:
    """The sources of a run.

    Args:
        device: this rank's, whose generator counts if it is a CUDA device.
        loaders: to look for more sources in.
    """

    def __init__(self, device: torch.device, loaders: Iterable[Any] = ()) -> None:
        self._device = None
        if device.type == "cuda":
            self._device = device
        self._own: dict[str, Any] = {}
        for number, loader in enumerate(loaders):
            self._own.update(_find(loader, f"loader {number}"))

    def capture(self) -> dict[str, Any]:
        """All states as they are. Takes about 60 microseconds."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if self._device is not None:
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        for name, source in self._own.items():
            state[name] = _get(source)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back a :meth:`capture`; sources that are not in it stay as they are."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if self._device is not None and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)
        for name, source in self._own.items():
            if name in state:
                _set(source, state[name])


def seed_all(*facts: object) -> None:
    """Seed the generators of the process by ``facts``: equal facts, equal numbers, on any machine."""
    # A hash of the text, as Python's own `hash` of strings is another one in each process. numpy takes 32 bits of it;
    # 63 for torch stay what a signed number of 64 bits holds.
    digest = hashlib.sha256(repr(facts).encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def to_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A :meth:`RandomStates.capture` as tensors, numbers and strings."""
    return {name: _to_plain(value) for name, value in state.items()}


def from_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`to_plain`."""
    return {name: _from_plain(value) for name, value in state.items()}


def _find(loader: Any, name: str) -> dict[str, Any]:
    """Sources among the attributes of a loader, and of samplers and datasets in it, each once, by where they are."""
    found: dict[str, Any] = {}
    seen: set[int] = set()  # a loader and its sampler often share a generator, which has one state

    def look_into(thing: Any, place: str, depth: int) -> None:
        # In the order of names, so that a source has the same place in the run that saves and in the one that resumes.
        for key, value in sorted(getattr(thing, "__dict__", {}).items()):
            if id(value) in seen:
                continue
            if isinstance(value, _OWN):
                seen.add(id(value))
                found[f"{place}.{key}"] = value
            elif isinstance(value, (Sampler, Dataset)) and depth:
                seen.add(id(value))
                look_into(value, f"{place}.{key}", depth - 1)

    look_into(loader, name, _DEPTH)
    return found


def _get(source: Any) -> Any:
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if isinstance(source, random.Random):
        return source.getstate()
    return source.get_state()


def _set(source: Any, state: Any) -> None:
    if isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif isinstance(source, random.Random):
        source.setstate(state)
    else:
        source.set_state(state)


def _to_plain(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state
    # numpy's Generator: a dict whose numbers may have 128 bits, which JSON writes in full, and in some kinds arrays.
    if isinstance(state, dict):
        return json.dumps(state, default=lambda array: array.tolist())
    # numpy's RandomState: the algorithm's name, its words, the position in them, whether a second normal number was
    # drawn and is left over, and that number.
    if isinstance(state[0], str):
        name, words, position, has_normal, normal = state
        rest = [int(position), int(has_normal), float(normal)]
        return {"name": name, "words": _bytes(words), "rest": rest}
    # Python's: the version of the format, words and the position in them, and a normal number left over, or None.
    version, words, normal = state
    return {"version": version, "words": _bytes(words), "normal": normal}


def _from_plain(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state
    if isinstance(state, str):
        return _with_arrays(json.loads(state))
    buffer = state["words"].numpy().tobytes()
    words = np.frombuffer(buffer, np.uint32)
    if "name" in state:
        return (state["name"], words, *state["rest"])
    return (state["version"], tuple(words.tolist()), state["normal"])


def _with_arrays(state: Any) -> Any:
    """The state of a numpy Generator, in which lists were arrays; what it has of these depends on its kind."""
    if isinstance(state, dict):
        return {key: _with_arrays(value) for key, value in state.items()}
    if isinstance(state, list):
        return np.array(state, np.uint64)
    return state


def _bytes(words: Any) -> Tensor:
    """Numbers of 32 bits as a tensor of bytes of its own: torch's types of 32 bits without a sign can do little."""
    array = np.asarray(words, np.uint32)
    return torch.from_numpy(array.view(np.uint8).copy())
