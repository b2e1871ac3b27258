"""Objects whose attributes a step may change, by name: modules, callbacks, and the user's objects in their attributes.

A name says where an object is: ``encoder.layer.0``; ``callback Histogram 0``; for a helper object ``encoder->cache.0``,
the first member of what ``encoder.cache`` holds. The LightningModule's own name is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeAlias

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

Place: TypeAlias = tuple[Any, ...]
"""An owner's name, one of its attributes, and keys or positions in the container that this holds."""

_OF_MODULES = frozenset(vars(nn.Module()))
_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_smddp", "torchmetrics"}
_OTHERS = {"builtins", "collections", "numpy"}
_MOST_MEMBERS = 1000  # of a container that is looked through for helpers


def owners_in(root: nn.Module) -> dict[str, Any]:
    """All of them. Metrics are none: see ``metrics.py``."""
    owners: dict[str, Any] = {}
    inside: set[int] = set()  # modules in metrics: a wrapper has others in it, and a collection its members
    for name, module in root.named_modules():
        if isinstance(module, (Metric, MetricCollection)):
            inside.update(map(id, module.modules()))
        elif id(module) not in inside:
            owners[name] = module
    owners.update(_callbacks(root))
    helpers = {}
    for name, owner in owners.items():
        for attribute, value in vars(owner).items():
            if attribute in _OF_MODULES or attribute in ("_trainer", "_fabric"):
                continue
            for index, member in enumerate(_members(value)):
                if _is_helper(member):
                    helpers[f"{name}->{attribute}.{index}"] = member
    return owners | helpers


def owner_named(root: nn.Module, name: str) -> Any:
    """One of :func:`owners_in`; None if there is none here."""
    name, _, helper = name.partition("->")
    owner: Any = None
    if name.startswith("callback "):
        owner = dict(_callbacks(root)).get(name)
    else:
        owner = root.get_submodule(name)
    if owner is None or not helper:
        return owner
    attribute, _, index = helper.rpartition(".")
    return next(islice(_members(vars(owner).get(attribute)), int(index), None), None)


def in_words(place: Place) -> str:
    """A place as code would have it."""
    name, _, helper = place[0].partition("->")
    words = ["self"]
    if name.startswith("callback "):
        words = [name.split(" ")[1]]
    elif name:
        words.append(name)
    attribute, _, index = helper.rpartition(".")
    if attribute:
        suffix = "" if index == "0" else f"[{index}]"
        words.append(attribute + suffix)
    words.append(place[1])
    return ".".join(words) + "".join(f"[{key!r}]" for key in place[2:])


def is_of_module(attribute: str) -> bool:
    """Whether it is torch's, not the user's: parameters, buffers, hooks."""
    return attribute in _OF_MODULES


def _callbacks(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """The user's, by class and number among them: ranks may have others of libraries."""
    trainer = vars(root).get("_trainer")
    counts: Counter[str] = Counter()
    for callback in getattr(trainer, "callbacks", ()):
        if not _is_of(callback, _LIBRARIES):
            kind = type(callback).__qualname__
            yield f"callback {kind} {counts[kind]}", callback
            counts[kind] += 1


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from islice(value, _MOST_MEMBERS)
    elif isinstance(value, dict):
        yield from islice(value.values(), _MOST_MEMBERS)
    else:
        yield value


def _is_helper(value: Any) -> bool:
    is_object = hasattr(value, "__dict__") and not callable(value)
    return is_object and not isinstance(value, (nn.Module, Tensor)) and not _is_of(value, _LIBRARIES | _OTHERS)


def _is_of(value: Any, libraries: set[str]) -> bool:
    return type(value).__module__.partition(".")[0] in libraries
