"""Runs that leave nothing behind: trial runs of a step before training begins."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_STRUCTURE = {"_parameters", "_buffers", "_modules"}


@contextmanager
def untouched(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back random numbers, buffers, gradients, and the attributes of all modules.

    Attributes are put back as objects; lists, dicts and sets among them also get back their members. What an object
    further inside has become is not undone.
    """
    attributes = [(module, _attributes(module)) for module in root.modules()]
    buffers = [(b, b.clone()) for b in root.buffers() if b.device.type != "meta"]
    gradients = [(p, p.grad) for p in root.parameters()]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for module, saved in attributes:
            _restore(module, saved)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of its members if it has some."""
    return {name: (value, _members(value)) for name, value in vars(module).items() if name not in _STRUCTURE}


def _members(value: Any) -> Any:
    if type(value) in (list, dict, set, OrderedDict):  # hooks of modules are in the last
        return value.copy()
    if isinstance(value, Tensor) and not value.requires_grad and value.device.type != "meta":
        return value.clone()  # the state of a metric, say
    return None


def _restore(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in saved and name not in _STRUCTURE]:
        del own[name]
    for name, (value, members) in saved.items():
        own[name] = value
        if members is None:
            continue
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.copy_(members)
        elif isinstance(value, list):
            value[:] = members
        else:
            value.clear()
            value.update(members)
