"""Random numbers that Python code draws: from ``random``, from numpy, and from generators of the user's own.

Generators of torch among these are taken for such, too. Torch's default ones are among them where Python reads
what torch draws: then all ranks have to draw the same.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_smddp._compat.torch import without_torch_functions
from lightning_smddp.pipeline.capture.generators import held_generators, set_state_of, state_of
from lightning_smddp.pipeline.capture.own_seeds import own_seed, seed_torch

States: TypeAlias = dict[str, Any]
"""By source, what it goes on from."""

_LONG = 10  # tuples that are longer hold numbers: Python's generator has a tuple of 625 words in its state
_NUMPY_SEEDS = 2**32  # as many as numpy's generators of the older kind take


class PythonRandom:
    """The sources that Python code under ``root`` may draw from.

    Generators are looked for once; another one may be in the same place later.

    Args:
        root: the module.
        device: with torch's default generators, of the CPU and of this device; None without.
    """

    def __init__(self, root: nn.Module, device: torch.device | None = None) -> None:
        self._device = device
        self._held = held_generators(root)

    @property
    def with_torch(self) -> bool:
        """Whether torch's generators are among them."""
        return self._device is not None

    def get(self) -> States:
        """What all sources go on from."""
        states: States = {"random": random.getstate()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            states["numpy"] = numpy.random.get_state()
        if self._device is not None:
            states |= _states_of_torch(self._device)
        for held in self._held:
            generator = held.generator()
            if generator is not None:
                states[f"held {held.name}"] = state_of(generator)
        return states

    def set(self, states: Mapping[str, Any]) -> None:
        """Let them go on from there."""
        # A source that was not there when the states were taken keeps its own.
        random.setstate(states["random"])
        if "numpy" in states:
            import numpy

            numpy.random.set_state(states["numpy"])
        if self._device is not None:
            _set_states_of_torch(states, self._device)
        for held in self._held:
            generator = held.generator()
            state = states.get(f"held {held.name}")
            if state is not None and generator is not None:
                set_state_of(generator, state)

    def with_own_torch(self, states: Mapping[str, Any]) -> States:
        """``states``, but torch's are those of now, on this rank."""
        return {**states, **_of_torch(self.get())}

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """What is drawn inside counts for nothing outside."""
        before = self.get()
        try:
            yield
        finally:
            self.set(before)

    def derived(self, states: Mapping[str, Any], number: int) -> States:
        """Other states, the same ones for the same ``states`` and ``number``."""
        # Each rank works them out by itself, from states that all have: nothing is sent.
        seed = digest(states) + number
        with self.put_back():
            self.set(states)
            self.seed(seed)
            return self.get()

    @contextmanager
    def apart(self, seed: int) -> Iterator[None]:
        """What torch draws inside follows from ``seed`` and counts for nothing outside; nothing where it is no source.

        Python draws nothing inside.
        """
        if self._device is None:
            yield
            return
        with torch.random.fork_rng(devices=generator_devices(self._device)):
            seed_torch(seed)
            yield

    def seed(self, number: int) -> None:
        """Start all sources anew from ``number``, each generator that a module holds with a seed of its own."""
        # Each kind of source takes seeds of another range.
        random.seed(number)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(number % _NUMPY_SEEDS)
        if self._device is not None:
            seed_torch(number)
        for position, held in enumerate(self._held, start=1):
            generator = held.generator()
            if generator is not None:
                _seed(generator, number + position)


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(own_seed(number))
        return
    seed = number % _NUMPY_SEEDS
    if isinstance(generator, random.Random) or hasattr(generator, "get_state"):
        generator.seed(seed)
        return
    # numpy's newer generators take a seed only where they are made: so the state of another one of the same kind is it.
    bits = type(generator.bit_generator)(seed)
    generator.bit_generator.state = bits.state


class SharedRandom:
    """What the micro-batches of a batch draw in Python: the same on all ranks of a pipeline, whatever is run when.

    The first micro-batch draws what the whole batch would draw in one process; the others have numbers of their own.

    Args:
        sources: of the module.
        states: at the begin of the step, the same on all ranks.
    """

    def __init__(self, sources: PythonRandom, states: States) -> None:
        self.sources = sources
        self.end = states
        self._states = {0: states}  # by micro-batch: what it begins with, however often it is run

    def has_drawn(self, end: Mapping[str, Any]) -> bool:
        """Whether torch has drawn between the step's begin and ``end``."""
        begin = _of_torch(self._states[0])
        return not same_states(begin, end)

    @contextmanager
    def around(self, index: int, sees_end: bool, inner: AbstractContextManager[object]) -> Iterator[None]:
        """Around ``inner`` and a run of the step on micro-batch ``index``."""
        with self.at(index):
            with inner:
                yield
            # Behind the batch numbers go on as in one process: from where the first micro-batch has left them, as seen
            # by a stage that comes to the end of the step.
            if sees_end and index == 0:
                self.end = self.sources.get()

    @contextmanager
    def at(self, index: int) -> Iterator[None]:
        """In this context the next number to be drawn is the first one of micro-batch ``index``."""
        if index not in self._states:
            self._states[index] = self.sources.derived(self._states[0], index)
        with self.sources.put_back():
            self.sources.set(self._states[index])
            yield


def generator_devices(device: torch.device) -> list[torch.device]:
    """Devices beside the CPU whose default generator a step on ``device`` uses, as ``fork_rng`` takes them."""
    if device.type == "cuda":
        return [device]
    return []


def digest(states: Mapping[str, Any]) -> int:
    """A number that differs where ``states`` do."""
    brief = [(source, _brief(states[source])) for source in sorted(states)]
    return zlib.crc32(repr(brief).encode())


def same_states(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether no number was drawn between the two. A source that is in one alone counts for nothing."""
    in_both = [source for source in a if source in b]
    return all(_same(a[source], b[source]) for source in in_both)


def to_json(states: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can hold them, for a message or a checkpoint; see :func:`from_json`."""
    return {source: _plain(state) for source, state in states.items()}


def from_json(data: Mapping[str, Any]) -> States:
    """The inverse of :func:`to_json`."""
    return {source: _object(state) for source, state in data.items()}


def _same(a: Any, b: Any) -> bool:
    """Whether two states are equal, which consist of tuples, dicts, arrays and numbers."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) < _LONG:
        if len(a) != len(b):
            return False
        return all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return False
        return all(_same(a[key], b[key]) for key in a)
    same = a == b
    if hasattr(a, "tolist") and hasattr(b, "tolist"):  # numpy's arrays
        same = same.all()
    return bool(same)


def _of_torch(states: Mapping[str, Any]) -> States:
    return {source: states[source] for source in ("torch", "cuda") if source in states}


def _states_of_torch(device: torch.device) -> States:
    """Of the CPU's and the device's generator. The step's code reads nothing here, whatever watches it."""
    with without_torch_functions():
        states: States = {"torch": torch.get_rng_state().numpy()}
        if device.type == "cuda":
            of_device = torch.cuda.get_rng_state(device)
            states["cuda"] = of_device.numpy()
    return states


def _set_states_of_torch(states: Mapping[str, Any], device: torch.device) -> None:
    with without_torch_functions():
        of_cpu = torch.from_numpy(states["torch"])
        torch.set_rng_state(of_cpu)
        if "cuda" in states:
            of_device = torch.from_numpy(states["cuda"])
            torch.cuda.set_rng_state(of_device, device)


def _brief(value: Any) -> Any:
    """A part of a state that differs from draw to draw: all of it takes long."""
    if isinstance(value, tuple) and len(value) < _LONG:
        return [_brief(part) for part in value]
    if isinstance(value, dict):
        return {key: _brief(part) for key, part in value.items()}
    if getattr(value, "dtype", None) == "uint8":  # the bytes of one of torch's
        return zlib.crc32(value.tobytes())
    if isinstance(value, tuple) or hasattr(value, "tolist"):
        # The last number of Python's is the position in its block of words: it moves with each draw, and where a block
        # is used up, the words are others.
        ends = (*value[:4], *value[-4:])
        return list(map(int, ends))
    return value


def _plain(value: Any) -> Any:
    """As data that JSON can hold: what it would turn into lists, or not take at all, is a dict that says its kind."""
    if isinstance(value, tuple):
        return {"tuple": [_plain(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": {key: _plain(part) for key, part in value.items()}}
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value


def _object(value: Any) -> Any:
    """The inverse of :func:`_plain`."""
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_object(part) for part in value["tuple"])
    if "dict" in value:
        return {key: _object(part) for key, part in value["dict"].items()}
    import numpy

    return numpy.array(value["array"], dtype=value["dtype"])
