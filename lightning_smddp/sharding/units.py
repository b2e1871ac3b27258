"""The modules whose parameters are gathered and freed together, found in the structure of a model.

A unit's parameters are whole while its ``forward`` runs, and sharded else. So a module can be one if nothing outside of
its ``forward`` uses its parameters. Elements of ``nn.ModuleList``, ``nn.Sequential`` and ``nn.ModuleDict`` are made to
be called: they are taken. All others, such as embeddings and heads, stay with the root, whose parameters are whole for
a whole step, and may be used in any way. Where that would be most of the model, as in a U-Net whose blocks are
attributes (``self.down1``, ``self.down2``), modules in attributes are taken as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn

Entry = str | type[nn.Module]  # a name of a module or of its class, or the class
Choice = Callable[[str, nn.Module], bool]  # whether the module of a name is a unit
Wrap = Sequence[str] | Sequence[Entry] | Choice | None  # names first: jsonargparse writes lists of these

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LARGE = 0.25  # of all parameters: an element that holds more is divided, if it has containers itself
_SMALL = 0.001  # an element that holds less is not worth two messages
_MOST = 0.8  # of a large element's parameters have to be in elements of its own for it to be divided
_ENOUGH = 0.5  # of all parameters: with less in elements of containers, attributes are elements as well


@dataclass
class Units:
    """Which modules are gathered by themselves.

    Attributes:
        names: of these modules, in the model's order; a module in another one comes behind it.
        notes: what was asked for and is not done, and why.
    """

    names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_units(model: nn.Module, wrap: Wrap = None) -> Units:
    """The units of ``model``.

    Args:
        model: the root, which is none.
        wrap: names of modules or their classes (themselves or by name), or what decides by name and module; None finds
            them.

    Raises:
        ValueError: ``wrap`` names what is no module of ``model``, or what cannot be called.
    """
    chosen = _found(model) if wrap is None else _given(model, wrap)
    # What is tied to a parameter outside would be freed while the other module still uses it. Of a unit that was found
    # nothing is said, as nobody has asked for it.
    everywhere = _users(model)
    units = Units()
    for name, module in chosen.items():
        inside = _users(module)
        tied = [key for key, p in module.named_parameters() if inside[id(p)] < everywhere[id(p)]]
        if not tied:
            units.names.append(name)
        elif wrap is not None:
            units.notes.append(f"{name} stays with the root: {name}.{tied[0]} is tied to a parameter outside of it")
    return units


def _size(module: nn.Module) -> int:
    """Elements of its parameters, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _found(model: nn.Module) -> dict[str, nn.Module]:
    """Elements of containers; where these have too little of the model, modules in attributes as well."""
    total = _size(model)
    elements = _elements(model, "", total, attributes=False)
    together = nn.ModuleList(elements.values())  # counts what is tied once
    if _size(together) < _ENOUGH * total:
        return _elements(model, "", total, attributes=True)
    return elements


def _elements(module: nn.Module, prefix: str, total: int, attributes: bool) -> dict[str, nn.Module]:
    """Elements of containers by name, the outermost ones that are not too large.

    Args:
        module: where to look.
        prefix: of the names of its children.
        total: parameters of the whole model.
        attributes: every module is a container, of those in its attributes.
    """
    found: dict[str, nn.Module] = {}
    with_parameters = [child for child in module.children() if _size(child) > 0]
    is_container = attributes or isinstance(module, _CONTAINERS)
    has_elements = is_container and len(with_parameters) > 1
    for key, child in module.named_children():
        name, size = f"{prefix}{key}", _size(child)
        if size < _SMALL * total or size == 0:
            continue
        # A child is one unit, unless it is so large that its own elements are better, and they are nearly all of it:
        # what is in none of them stays with the root, whole for a whole step.
        inside = _elements(child, f"{name}.", total, attributes)
        in_elements = sum(_size(element) for element in inside.values())
        is_divided = size > _LARGE * total and in_elements > _MOST * size
        if has_elements and is_callable(child) and not is_divided:
            found[name] = child
        else:
            found.update(inside)
    return found


def is_callable(module: nn.Module) -> bool:
    """Whether it has a ``forward``, unlike containers that are only looked up in."""
    return type(module).forward is not nn.Module.forward


def _given(model: nn.Module, wrap: Choice | Sequence[Entry]) -> dict[str, nn.Module]:
    # What has no `forward` is no unit: there is nothing around which its parameters could be gathered.
    modules = {name: module for name, module in model.named_modules() if name and is_callable(module)}
    if callable(wrap):
        return {name: module for name, module in modules.items() if wrap(name, module)}
    found: set[str] = set()
    for entry in wrap:
        names = [
            name for name, module in modules.items() if entry in (name, type(module).__name__, *type(module).__mro__)
        ]
        if not names:
            raise ValueError(
                f"wrap={list(wrap)!r}: {entry!r} is neither the name of a module with a `forward` in "
                f"{type(model).__name__} nor the class of one. There are: {', '.join(list(modules)[:8])} ..."
            )
        found.update(names)
    return {name: module for name, module in modules.items() if name in found}


def places(root: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Each parameter with the modules that have it as their own, and its name there: one that is tied is in several."""
    own = partial(nn.Module.named_parameters, recurse=False, remove_duplicate=False)
    return [(module, key, parameter) for module in root.modules() for key, parameter in own(module)]


def _users(root: nn.Module) -> Counter[int]:
    """In how many places there is each parameter, by ``id``."""
    return Counter(id(parameter) for *_, parameter in places(root))
