"""First values for parameters that were created without memory, the same for any number of ranks and stages."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_smddp._compat.torch import initializer, swap_contents
from lightning_smddp.pipeline.state.absent import set_contents


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it every new parameter of any module goes to the meta device, and every buffer stays: for big models.

    Each parameter is created first and then loses its memory, so the peak is one parameter. What is assigned to a
    name that the module has already is taken for values that the user wants, such as those of a pretrained model, and
    stays. First values set in place by the module's constructor are lost: :func:`materialize` sets them.
    """

    def forget_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.is_meta:
            return
        # Called before the module takes the parameter: where the name is known, it replaces another one.
        known = dict(module.named_parameters(recurse=False))
        if name not in known:
            set_contents(parameter, torch.empty_like(parameter, device="meta"))

    handle = register_module_parameter_registration_hook(forget_values)
    try:
        yield
    finally:
        handle.remove()


def materialize(module: nn.Module, names: Collection[str], device: torch.device, seed: int) -> None:
    """Give memory and first values to the parameters ``names`` and to all buffers, where they are on the meta device.

    Module by module: its own parameters and buffers (not those of modules in it) get memory; then its
    ``reset_parameters()`` runs. In models that have ``_init_weights(module)``, as those of transformers do, that
    follows, for the module and for the modules around it. Random numbers depend on ``seed`` and these modules' names
    alone, so the values do not depend on what is initialised where. A tied parameter gets its values from the first
    module that has it. What a constructor does beyond that is not repeated.

    Args:
        module: the model.
        names: parameters that this rank holds, by first name.
        device: where to.
        seed: the same on every rank.

    Raises:
        ValueError: a module has no initialiser, or it leaves something without values.
    """
    without_values = [parameter for name, parameter in module.named_parameters() if name in names and parameter.is_meta]
    wanted = set(map(id, without_values))
    values: list[tuple[nn.Parameter, Tensor]] = []
    with _all_on_meta(module):  # an initialiser sees no values but those that it sets
        for name, child in module.named_modules():
            local = [key for key, parameter in child.named_parameters(recurse=False) if id(parameter) in wanted]
            buffers = [key for key, buffer in child.named_buffers(recurse=False) if buffer.is_meta]
            if not local and not buffers:
                continue
            found = _Initialisation(module, name, local, buffers).run(device, seed)
            values += found
            # A tied parameter has its values now, from the first module that names it, as in a model that was built
            # whole.
            wanted.difference_update(id(parameter) for parameter, _ in found)
    for parameter, value in values:
        set_contents(parameter, value)


@contextmanager
def _all_on_meta(module: nn.Module) -> Iterator[None]:
    """Within it no parameter has values; then those that had some have them again."""
    hidden: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in module.parameters():
        if not parameter.is_meta:
            contents = torch.empty_like(parameter, device="meta", requires_grad=parameter.requires_grad)
            swap_contents(parameter, contents)
            hidden.append((parameter, contents))
    try:
        yield
    finally:
        for parameter, contents in hidden:
            swap_contents(parameter, contents)


class _Initialisation:
    """One module's own tensors get their first values.

    All of its parameters do, whether this rank holds them (``local``) or not, as they draw from the same random numbers
    in turn: so a parameter's first values are the same in every layout.

    Args:
        root: the model.
        name: of the module in it.
        local: names of the module's own parameters that this rank holds.
        buffers: names of its buffers on the meta device.
    """

    def __init__(self, root: nn.Module, name: str, local: list[str], buffers: list[str]) -> None:
        self.root = root
        self.name = name
        self.module = root.get_submodule(name)
        self.parameters = dict(self.module.named_parameters(recurse=False))
        self.local = local
        self.buffers = buffers

    def run(self, device: torch.device, seed: int) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that this rank holds, with their values. Buffers have theirs set."""
        initialisers = self._initialisers()
        # Parameters have memory only while their initialisers run; before and after `contents` has it. So those of the
        # next module see none of these values.
        contents = {key: _blank(parameter, device) for key, parameter in self.parameters.items()}
        for key, parameter in self.parameters.items():
            swap_contents(parameter, contents[key])
        try:
            for key in self.buffers:
                buffer = getattr(self.module, key)
                set_contents(buffer, _blank(buffer, device))
            devices = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                # A seed of its own for each module and each of its initialisers: what is drawn depends neither on
                # which other modules a rank holds, nor on the order in which they are come to.
                for caller, initialise in initialisers:
                    torch.manual_seed(_seed(seed, self.name, caller))
                    initialise()
            self._take_replaced()
            self._require_values()
        finally:
            for key, parameter in self.parameters.items():
                swap_contents(parameter, contents[key])
        return [(self.parameters[key], contents[key]) for key in self.local]

    def _initialisers(self) -> list[tuple[str, Callable[[], object]]]:
        """What sets this module's values, in order, each with the name of the module that it is called for."""
        # First its own, then `_init_weights` for each module from it outwards, as a whole model is initialised from the
        # inside out.
        found: list[tuple[str, Callable[[], object]]] = []
        own = initializer(self.module)
        if own is not None:
            found.append((f"{self.name}()", own))
        for path in _outwards(self.name):
            init_weights = _init_weights_around(self.root, path)
            if init_weights is not None:
                found.append((path, partial(init_weights, self.root.get_submodule(path))))
        if not found:
            empty = ", ".join([*self.local, *self.buffers])
            raise ValueError(
                f"{self._title()} has {empty} on the meta device and nothing that sets their first values. Define "
                f"`reset_parameters(self)` in {type(self.module).__name__}, or create it on a real device."
            )
        return found

    def _take_replaced(self) -> None:
        """An initialiser may assign a new parameter instead of filling the old one, which has to stay the object."""
        for key, parameter in self.parameters.items():
            new = getattr(self.module, key)
            if new is not parameter:
                set_contents(parameter, new)
                setattr(self.module, key, parameter)

    def _require_values(self) -> None:
        """Raise ``ValueError`` if a number is still the NaN that it was."""
        empty = [key for key in [*self.local, *self.buffers] if bool(getattr(self.module, key).isnan().any())]
        if empty:
            raise ValueError(
                f"The initialisation of {self._title()} leaves {', '.join(empty)} without values. Set them in its "
                "`reset_parameters(self)`, or create it on a real device."
            )

    def _title(self) -> str:
        if self.name:
            return f"{type(self.module).__name__} {self.name!r}"
        return type(self.module).__name__


def _outwards(name: str) -> list[str]:
    """``"a.b"`` gives ``["a.b", "a", ""]``."""
    paths = []
    while name:
        paths.append(name)
        name, _, _ = name.rpartition(".")
    return [*paths, ""]


def _seed(*facts: object) -> int:
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return int.from_bytes(digest[:7], "big")  # torch's seeds have 64 bits


def _init_weights_around(root: nn.Module, name: str) -> Callable[[nn.Module], object] | None:
    """``_init_weights`` of the innermost module from ``name`` outwards whose signature takes one module."""
    for path in _outwards(name):
        method: Any = getattr(root.get_submodule(path), "_init_weights", None)
        if not callable(method):
            continue
        try:
            inspect.signature(method).bind(root)
        except TypeError:  # someone else's meaning of the name
            continue
        return cast(Callable[[nn.Module], object], method)
    return None


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for ``tensor``, filled with NaN, which no initialiser leaves behind; integers are 0, as they have none."""
    blank = torch.zeros_like(tensor, device=device, requires_grad=tensor.requires_grad)
    if blank.is_floating_point() or blank.is_complex():
        blank.detach().fill_(torch.nan)
    return blank
