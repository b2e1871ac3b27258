"""Generators that a user's code keeps for itself: in attributes, objects and containers there, global variables."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_smddp._compat.torch import without_torch_functions

Members: TypeAlias = list[tuple[Any, Any]]  # keys and values

_DEPTH = 3  # of an attribute of an object in a list in an attribute
_MOST_MEMBERS = 100  # of a container; one with more is data
_OF_MODULES = frozenset(vars(nn.Module())) | {"_trainer", "_fabric"}
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, torch.Size, torch.dtype, torch.device})
_NO_HELPERS = (nn.Module, Tensor, Dataset, Sampler, DataLoader, type, types.ModuleType, types.FunctionType)
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_smddp", "torchmetrics", "numpy")
_OF_PYTHON = ("builtins", "random", "types", "functools", "collections", "threading")


@dataclass(frozen=True)
class Held:
    """Where a generator is kept; another one may be there later.

    Attributes:
        name: of the place, the same on all ranks.
        container: attributes of an object, or a dict or list.
        key: in it.
    """

    name: str
    container: Any
    key: Any

    def generator(self) -> Any:
        """The one that is there now; None if there is none."""
        try:
            value = self.container[self.key]
        except (KeyError, IndexError):
            return None
        if is_generator(value):
            return value
        return None


def is_generator(value: Any) -> bool:
    """Whether random numbers can be drawn from ``value``, and its state put back."""
    return _draws(type(value))  # type: ignore[arg-type]  # of `object`, mypy takes a class's hash for its instances'


@functools.lru_cache(maxsize=4096)
def _draws(kind: type) -> bool:
    """A class is asked once: torch's ``isinstance`` for generators is Python code, and each trial asks for all."""
    if issubclass(kind, (random.Random, torch.Generator)):
        return not issubclass(kind, random.SystemRandom)
    numpy = sys.modules.get("numpy")  # without it there is no object of its classes
    return numpy is not None and issubclass(kind, (numpy.random.Generator, numpy.random.RandomState))


def held_generators(root: nn.Module) -> list[Held]:
    """Those that code of the modules in ``root`` can come to, in the same order on all ranks.

    Looked into are objects of the user's classes in attributes, and global variables of the files that the modules'
    classes are in. Datasets and samplers are left out: a step does not draw from them.
    """
    seen: set[int] = set()
    found: list[Held] = []
    kinds: dict[type, None] = {}
    for path, module in root.named_modules():
        kinds[type(module)] = None
        attributes = vars(module)
        own = []
        for name, value in attributes.items():
            if type(value) not in _PLAIN and name not in _OF_MODULES:
                own.append((name, value))
        found += _found_in(attributes, own, f"{path}.", seen, _DEPTH)
    # A method may be a base's, and its global variables are those of the file that the base is in.
    bases = dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in kinds))
    files = dict.fromkeys(kind.__module__ for kind in bases if not _is_of_a_library(kind))
    for file in files:
        if file not in sys.modules:
            continue
        variables = vars(sys.modules[file])
        found += _found_in(variables, list(variables.items()), f"global {file}.", seen, 0)
    return found


def _found_in(
    container: Any,
    members: Members,
    name: str,
    seen: set[int],
    depth: int,
) -> Iterator[Held]:
    """Generators among ``members`` of ``container``, and down to ``depth`` in these."""
    # A generator that is in two places is known by the first: its state is put back once.
    for key, value in members:
        if type(value) in _PLAIN or id(value) in seen:
            continue
        if is_generator(value):
            seen.add(id(value))
            yield Held(f"{name}{key}", container, key)
        elif depth:
            inside = _inside(value)
            if inside is not None:
                seen.add(id(value))
                inner, inner_members = inside
                yield from _found_in(inner, inner_members, f"{name}{key}.", seen, depth - 1)


def _inside(value: Any) -> tuple[Any, Members] | None:
    """What to look up keys in, and its members: of a container, or a helper's attributes. None if of no interest."""
    if isinstance(value, Mapping):
        if len(value) > _MOST_MEMBERS:
            return None
        return value, list(value.items())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if len(value) > _MOST_MEMBERS:
            return None
        return value, list(enumerate(value))
    if isinstance(value, _NO_HELPERS) or _is_of_a_library(type(value)):
        return None
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict or len(attributes) > _MOST_MEMBERS:
        return None
    return attributes, list(attributes.items())


def _is_of_a_library(kind: type) -> bool:
    package, _, _ = kind.__module__.partition(".")
    return package in _LIBRARIES + _OF_PYTHON


def state_of(generator: Any) -> Any:
    """What it goes on from."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        with without_torch_functions():
            return generator.get_state().numpy()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def set_state_of(generator: Any, state: Any) -> None:
    """Let it go on from there."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        with without_torch_functions():
            generator.set_state(torch.from_numpy(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
