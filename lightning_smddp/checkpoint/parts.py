"""A Trainer's checkpoint in two: tensors under names that mean the same in every layout, and the rest.

Tensors of the model are known as ``state_dict.<name>``, those of optimizers by the name of their parameter:
``optimizer.<index>.<parameter>.<key>``. In the rest a text stands for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Names = Sequence[Mapping[int, str]]
"""For each optimizer the names of its parameters, by their number in its ``state_dict()``."""

_PREFIX = "\0tensor "  # of the text that stands for a tensor


def names_of(module: nn.Module, optimized: Iterable[Sequence[Tensor]]) -> list[dict[int, str]]:
    """The :data:`Names` of optimizers whose parameters, of all groups in order, are ``optimized``."""
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    return [{number: name_of[id(p)] for number, p in enumerate(each) if id(p) in name_of} for each in optimized]


def split(checkpoint: Mapping[str, Any], names: Names = ()) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, not copied, and the rest of a checkpoint, or of one rank's part of it.

    Args:
        checkpoint: what Lightning saves; on a rank that holds a part of the model, with that part of ``state_dict``
            and of each optimizer's ``state``.
        names: of the optimizers' parameters. A number without one is its own name.

    Raises:
        ValueError: a tensor has no values yet.
    """
    tensors: dict[str, Tensor] = {}
    rest = dict(checkpoint)
    if "state_dict" in checkpoint:
        rest["state_dict"] = _placed(checkpoint["state_dict"], "state_dict", tensors, {})
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = []
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        known = names[index] if index < len(names) else {}
        states = {}
        for number, state in optimizer["state"].items():
            parameter = known.get(number, f"parameter {number}")
            states[number] = _placed(state, f"optimizer.{index}.{parameter}", tensors, {})
        rest["optimizer_states"].append({**optimizer, "state": states})
    return tensors, rest


def _placed(value: Any, name: str, tensors: dict[str, Tensor], places: dict[Any, str]) -> Any:
    """``value`` with texts for its tensors, which go to ``tensors``; ``places``: memory -> name, of those so far."""
    if isinstance(value, Mapping):
        return {key: _placed(item, f"{name}.{key}", tensors, places) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placed(item, f"{name}.{number}", tensors, places) for number, item in enumerate(value))
    if type(value) not in (Tensor, nn.Parameter, DTensor) or value.layout is not torch.strided or value.is_quantized:
        return value
    if value.is_meta:
        raise ValueError(
            f"{name} has no values yet, so it cannot be saved. With `meta_init` it gets them at the first batch: "
            "save after that."
        )
    # Names of tied weights are one tensor. What is divided, or has no elements, has no address.
    address = 0 if isinstance(value, DTensor) else value.data_ptr()
    memory = (address or id(value), value.device, value.dtype, value.shape, value.stride())
    known = places.setdefault(memory, name)
    tensors[known] = value
    return _PREFIX + known


def merge(parts: Sequence[Mapping[Any, Any]], order: Iterable[Any]) -> dict[Any, Any]:
    """What several ranks know, in an ``order`` of keys; of what several have, the first one's counts."""
    merged = {key: value for part in reversed(parts) for key, value in part.items()}
    return {key: merged[key] for key in [*order, *merged] if key in merged}


def stored_in(value: Any) -> list[str]:
    """Names of the tensors for which texts stand in a part of the rest, each once."""
    found: dict[str, None] = {}
    filled(value, found.setdefault)
    return list(found)


def filled(value: Any, tensor_of: Callable[[str], Any]) -> Any:
    """A part of the rest with its tensors, by name."""
    if isinstance(value, dict):
        return {key: filled(item, tensor_of) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(filled(item, tensor_of) for item in value)
    if isinstance(value, str) and value.startswith(_PREFIX):
        return tensor_of(value.removeprefix(_PREFIX))
    return value
