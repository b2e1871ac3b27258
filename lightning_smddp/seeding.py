"""Random numbers of a step: they follow from the run's seed, the step, the micro-batch, and the modules that draw.

Before a micro-batch all generators are seeded. A module that draws does so behind a seed of its own, and what comes
behind it goes on from another one; both follow from the seed before, so that they depend on which modules have drawn,
in which order, and on nothing else: who runs a part of the modules alone goes on with the same numbers all the same. A
module that draws nothing changes nothing, unless its caller has drawn since the last seed: then what follows it begins
anew, too.

torch's own ``initial_seed`` carries the seed on. It says nothing of how much was drawn since, and a checkpoint's second
run restores it with the rest of the state, so its modules draw what they drew in the first.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from lightning_smddp._compat.torch import COMPILED_CALL, compiled_call, hooked_call, without_torch_functions
from lightning_smddp.patches import Patch, patched

Forward: TypeAlias = Callable[..., Any]

_BITS = 0x7FFFFFFFFFFFFFFF  # of a seed: what torch takes
_NUMPY_SEEDS = 2**32  # as many as numpy's generators of the older kind take
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def mix(*numbers: int) -> int:
    """A seed that follows from ``numbers``, the same in every process."""
    return hash(numbers) & _BITS


def step_seed(run_seed: int, hook: str, epoch: int, *indices: int) -> int:
    """The seed of one batch: of its step method's name, the epoch, the batch's (and dataloader's, replica's) index."""
    return mix(run_seed, zlib.crc32(hook.encode()), epoch, *indices)


def run_seed() -> int:
    """The seed that the user gave to Lightning; else torch's, as this process has it."""
    given = os.environ.get("PL_GLOBAL_SEED")
    return int(given) if given else torch.initial_seed()


class Generators:
    """All sources of random numbers that a step may use: torch's, Python's, numpy's, and the modules' own.

    Args:
        root: generators in attributes of its modules are the modules' own.
        device: whose default generator of torch is used beside the CPU's.

    Attributes:
        python: whether Python's and numpy's are used, which takes time.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.torch = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self.torch.append(torch.cuda.default_generators[index])
        self.python = True
        # (attributes of a module, name): another generator may be there later
        self._places = [
            (vars(module), name)
            for module in root.modules()
            for name, value in vars(module).items()
            if is_generator(value)
        ]

    def held(self) -> list[Any]:
        """The generators that attributes of modules hold now; others may have taken their places since the start."""
        found = [attributes.get(name) for attributes, name in self._places]
        return [generator for generator in found if is_generator(generator)]

    def seed(self, number: int) -> None:
        """Start all of them anew."""
        for generator in self.torch:
            generator.manual_seed(number)
        for position, held in enumerate(self.held() if self._places else (), start=1):
            _seed(held, mix(number, position))
        if self.python:
            random.seed(number)
            np.random.seed(number % _NUMPY_SEEDS)

    def states_of_torch(self) -> list[Any]:
        """Of torch's generators, the modules' own among them."""
        own = [held for held in self.held() if isinstance(held, torch.Generator)]
        return [generator.get_state() for generator in (*self.torch, *own)]

    def states(self) -> list[Any]:
        """What each of them goes on from."""
        found = [state_of(generator) for generator in (*self.torch, *self.held())]
        if self.python:
            found += [random.getstate(), np.random.get_state(legacy=False)]
        return found

    def restore(self, states: list[Any]) -> None:
        """Go on from there."""
        remaining = iter(states)
        for generator in self.torch:  # not by `set_state`, which dynamo cannot trace
            generator.set_state(next(remaining))
        for held in self.held():
            set_state(held, next(remaining))
        if self.python:
            random.setstate(next(remaining))
            np.random.set_state(next(remaining))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """What is drawn inside counts for nothing outside."""
        with without_torch_functions():
            before = self.states()
        try:
            yield
        finally:
            with without_torch_functions():
                self.restore(before)


def seeded(generators: Generators, call: Callable[[], Any]) -> Any:
    """Run ``call``, of a module that is known to draw, or behind draws of its caller."""
    number = torch.default_generator.initial_seed()
    generators.seed(mix(number, 1))
    result = call()
    generators.seed(mix(number, 2))
    return result


@contextmanager
def seeded_modules(root: nn.Module, generators: Generators) -> Iterator[None]:
    """Within it modules of ``root`` draw as above; who draws is seen by looking before and behind each call."""

    def wrap(name: str, forward: Forward) -> Forward:
        def drawing(*args: Any, **kwargs: Any) -> Any:
            call = SeededCall(generators)
            result = forward(*args, **kwargs)
            call.end()
            return result

        return drawing

    with patched(forward_patches(root, wrap, drawing_candidates(root))):
        yield


class SeededCall:
    """A module's call, of which nobody knows yet whether it draws. It begins when this is made."""

    def __init__(self, generators: Generators) -> None:
        self.generators = generators
        self.number = torch.default_generator.initial_seed()
        self._begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # each number of Python's state would be a guard
    def _begin(self) -> None:
        generators = self.generators
        with without_torch_functions():
            self.before = generators.states()
            drawn_from = generators.states_of_torch()
            generators.seed(self.number)
            self.is_behind_draws = not same(drawn_from, generators.states_of_torch())
            generators.seed(mix(self.number, 1))
            self.fresh = generators.states()

    def end(self) -> bool:
        """The call has returned. Whether it is one that is seeded: it has drawn, or comes behind draws."""
        with without_torch_functions():
            is_seeded = self.is_behind_draws or not same(self.fresh, self.generators.states())
            if is_seeded:
                self.generators.seed(mix(self.number, 2))
            else:
                self.generators.restore(self.before)
        return is_seeded


def drawing_candidates(root: nn.Module) -> list[str]:
    """The modules whose calls may be seeded: all but ``root``, and but those within compiled ones."""
    names: list[str] = []
    sealed: tuple[str, ...] = ()
    for name, module in root.named_modules():
        if not name or name.startswith(sealed or ("\0",)):
            continue
        names.append(name)
        if compiled_call(module) is not None or hasattr(module, "_orig_mod"):
            sealed = (*sealed, f"{name}.")
    return names


def forward_patches(root: nn.Module, wrap: Callable[[str, Forward], Forward], names: Iterable[str]) -> list[Patch]:
    """Patches with which ``forward`` of the modules ``names`` of ``root`` is ``wrap(name, forward)``."""
    patches: list[Patch] = []
    for name in names:
        module: Any = root
        for attribute in name.split("."):  # in each step: `get_submodule` takes three times as long
            module = module._modules[attribute]
        attributes, key = vars(module), "forward"
        whole = compiled_call(module) or hooked_call(module)
        if whole is not None:  # else the wrapper would be compiled, and what hooks do would come outside of it
            key = COMPILED_CALL
        elif attributes.get(COMPILED_CALL) is not None:  # its hooks are compiled with it: it is not, here
            patches.append((attributes, COMPILED_CALL, None))
        patches.append((attributes, key, wrap(name, whole or module.forward)))
    return patches


def same(states: list[Any], others: list[Any]) -> bool:
    """Whether all are equal; a shorter list counts as far as it goes."""
    return all(_equal(one, other) for one, other in zip(states, others, strict=False))


def _equal(state: Any, other: Any) -> bool:
    if type(state) is not type(other):
        return False
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):  # numpy's; its representation would take a millisecond
        return state.keys() == other.keys() and all(_equal(state[key], other[key]) for key in state)
    equal = state == other
    return bool(equal if isinstance(equal, bool) else equal.all())  # all of a numpy array


def is_generator(value: Any) -> bool:
    """Whether it is torch's, Python's or one of numpy's."""
    # torch's isinstance for generators is Python code, and this is asked for each attribute: so the class is asked.
    return issubclass(type(value), _KINDS)


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):  # numpy's of the older kind
        generator.seed(number % _NUMPY_SEEDS)
    else:  # numpy's take a seed only where they are made
        generator.bit_generator.state = type(generator.bit_generator)(number).state


def state_of(generator: Any) -> Any:
    """The state that :func:`set_state` takes."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):  # numpy's of the older kind may have a normal number left over
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def set_state(generator: Any, state: Any) -> None:
    """Let it go on from a :func:`state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
