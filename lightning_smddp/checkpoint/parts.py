"""A Trainer's checkpoint in two: tensors under names that mean the same in every layout, and the rest.

Tensors of the model are known as ``state_dict.<name>``, those of optimizers by the name of their parameter:
``optimizer_states.<index>.<parameter>.<key>``. What is said about several ranks' parts of one checkpoint is plain
data (:class:`Outline`), and what they have in common (epoch, loops, callbacks ...) is the first rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.wire.encode import Path, UnknownTypeError, decode, encode

Names = Sequence[Mapping[int, str]]
"""For each optimizer the names of its parameters, by their number in its ``state_dict()``."""


@dataclass
class Outline:
    """Where a checkpoint's tensors belong.

    Attributes:
        state_dict: name -> path of its tensor (several names may share one); None if it is in the rest.
        optimizers: for each one, number of a parameter -> its state, encoded.
    """

    state_dict: dict[str, Path | None] = field(default_factory=dict)
    optimizers: list[dict[int, Any]] = field(default_factory=list)

    def to_json(self) -> Any:
        """As JSON."""
        return [list(self.state_dict.items()), [list(states.items()) for states in self.optimizers]]

    @classmethod
    def from_json(cls, told: Any) -> Outline:
        """The inverse of :meth:`to_json`."""
        entries, optimizers = told
        state = {name: None if path is None else tuple(path) for name, path in entries}
        return cls(state, [dict(states) for states in optimizers])

    def add(self, other: Outline) -> None:
        """Take in what this one does not have."""
        self.state_dict = {**other.state_dict, **self.state_dict}
        missing = len(other.optimizers) - len(self.optimizers)
        self.optimizers += [{} for _ in range(missing)]
        for mine, theirs in zip(self.optimizers, other.optimizers, strict=False):
            mine.update({number: encoded for number, encoded in theirs.items() if number not in mine})

    def sort(self, order: Sequence[str], rest: Mapping[str, Any]) -> None:
        """As in a checkpoint of one process: by the module's names, and by the groups' parameters."""
        known = {name: self.state_dict[name] for name in order if name in self.state_dict}
        self.state_dict = {**known, **self.state_dict}
        for index, states in enumerate(self.optimizers):
            groups = rest["optimizer_states"][index]["param_groups"]
            numbers = [number for group in groups for number in group["params"]]
            ordered = {number: states[number] for number in numbers if number in states}
            self.optimizers[index] = {**ordered, **states}


@dataclass
class Parts:
    """A checkpoint, or one rank's part of it, taken apart."""

    tensors: dict[Path, Tensor] = field(default_factory=dict)
    outline: Outline = field(default_factory=Outline)
    rest: dict[str, Any] = field(default_factory=dict)


def take_apart(checkpoint: Mapping[str, Any], names: Names = ()) -> Parts:
    """The inverse of :func:`put_together`; changes nothing and copies nothing.

    Args:
        checkpoint: what Lightning saves; on a rank that holds a part of the model, with that part of ``state_dict``
            and of each optimizer's ``state``.
        names: of the optimizers' parameters. A number without one is its own name.

    Raises:
        ValueError: a tensor has no values yet, or an optimizer's state has something else than tensors and plain data.
    """
    parts = Parts(rest=dict(checkpoint))
    if "state_dict" in checkpoint:
        parts.rest["state_dict"] = _take_model(checkpoint["state_dict"], parts)
    if "optimizer_states" in checkpoint:
        parts.rest["optimizer_states"] = [
            _take_optimizer(state, str(index), names[index] if index < len(names) else {}, parts)
            for index, state in enumerate(checkpoint["optimizer_states"])
        ]
    return parts


def put_together(rest: Mapping[str, Any], outline: Outline, tensors: Mapping[Path, Tensor]) -> dict[str, Any]:
    """A checkpoint as Lightning saves it; names that shared memory share it again."""
    checkpoint = dict(rest)
    if "state_dict" in rest:
        left = rest["state_dict"]
        checkpoint["state_dict"] = {
            name: left[name] if path is None else tensors[path] for name, path in outline.state_dict.items()
        }
    if "optimizer_states" in rest:
        checkpoint["optimizer_states"] = [
            {
                **state,
                "state": {**{number: decode(value, tensors) for number, value in states.items()}, **state["state"]},
            }
            for state, states in zip(rest["optimizer_states"], outline.optimizers, strict=True)
        ]
    return checkpoint


def names_of(module: nn.Module, groups: Sequence[Sequence[Tensor]]) -> list[dict[int, str]]:
    """The :data:`Names` of optimizers whose parameters, of all groups in order, are ``groups``."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        {number: names[id(parameter)] for number, parameter in enumerate(parameters) if id(parameter) in names}
        for parameters in groups
    ]


def _take_model(state: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    left: dict[str, Any] = {}
    known: dict[Any, Path] = {}
    for name, value in state.items():
        path: Path | None = None
        if _is_plain(value, name):
            path = known.setdefault(_place(value), ("state_dict", name))
            parts.tensors[path] = value
        else:
            left[name] = value
        parts.outline.state_dict[name] = path
    return left


def _take_optimizer(state: Mapping[str, Any], index: str, names: Mapping[int, str], parts: Parts) -> dict[str, Any]:
    encoded, left = {}, {}
    for number, value in state["state"].items():
        if isinstance(number, int):
            name = names.get(number, f"parameter {number}")
            encoded[number] = _take_state(value, ("optimizer_states", index, name), parts.tensors)
        else:
            left[number] = value
    parts.outline.optimizers.append(encoded)
    return {**state, "state": left}


def _is_plain(value: Any, name: str) -> bool:
    """Whether it is stored with the tensors."""
    if not isinstance(value, Tensor):
        return False
    if value.is_meta:
        raise ValueError(
            f"{name} has no values yet, so it cannot be saved. With `meta_init` it gets them at the first batch: "
            "save after that."
        )
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized


def _place(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _take_state(value: Any, path: Path, tensors: dict[Path, Tensor]) -> list[Any]:
    """The state of one parameter without its tensors."""
    own: dict[Path, Tensor] = {}
    try:
        plain = encode(value, own, path)
        for place, tensor in own.items():
            if not _is_plain(tensor, ".".join(place)):
                raise UnknownTypeError(place, f"{type(tensor).__name__} ({tensor.layout})")
    except UnknownTypeError as error:
        raise ValueError(
            f"{error}. A sharded checkpoint has tensors, numbers, texts, None, and lists, tuples and dicts of these in "
            "optimizer states; save with sharded=False."
        ) from error
    tensors.update(own)
    return plain
