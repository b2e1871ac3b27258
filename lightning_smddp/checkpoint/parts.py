"""A Trainer's checkpoint in two: tensors under names that mean the same in every layout, and the rest.

Tensors of the model are known as ``state_dict.<name>``, those of optimizers by the name of their parameter:
``optimizer_states.<index>.<parameter>.<key>``. What is said about several ranks' parts of one checkpoint is plain
data (:class:`Outline`), and what they have in common (epoch, loops, callbacks ...) is the first rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_smddp.wire.encode import Path, UnknownTypeError, decode, encode

Key = TypeVar("Key")
Value = TypeVar("Value")
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
        """Lists of pairs, as keys of JSON objects are strings."""
        optimizers = [list(states.items()) for states in self.optimizers]
        return [list(self.state_dict.items()), optimizers]

    @classmethod
    def from_json(cls, told: Any) -> Outline:
        """The inverse of :meth:`to_json`."""
        entries, optimizers = told
        outline = cls(optimizers=[dict(states) for states in optimizers])
        for name, path in entries:
            if path is not None:
                path = tuple(path)
            outline.state_dict[name] = path
        return outline

    @classmethod
    def merged(
        cls,
        outlines: Sequence[Outline],
        order: Sequence[str],
        rest: Mapping[str, Any],
    ) -> Outline:
        """That of the whole checkpoint, in the order that it has in one process.

        Args:
            outlines: of each rank; of what several have, the first one's counts.
            order: the names in the whole module's ``state_dict``. Others come behind.
            rest: of the whole checkpoint. Its parameter groups give the order of the optimizers' parameters.
        """
        # Ranks of a pipeline know different names of the model and different parameters of the same optimizers.
        whole = cls()
        # From the last rank to the first: what is set later stays.
        for outline in reversed(outlines):
            whole.state_dict.update(outline.state_dict)
        whole.state_dict = _sorted(whole.state_dict, order)
        for index, optimizer in enumerate(rest.get("optimizer_states", ())):
            states: dict[int, Any] = {}
            for outline in reversed(outlines):
                if index < len(outline.optimizers):
                    states.update(outline.optimizers[index])
            numbers: list[int] = []
            for group in optimizer["param_groups"]:
                numbers += group["params"]
            whole.optimizers.append(_sorted(states, numbers))
        return whole


def _sorted(values: Mapping[Key, Value], order: Iterable[Key]) -> dict[Key, Value]:
    """By the ``order`` of keys; those that are not in it come behind."""
    ordered: dict[Key, Value] = {}
    for key in order:
        if key in values:
            ordered[key] = values[key]
    ordered.update(values)  # keys that are there stay where they are
    return ordered


@dataclass
class CheckpointParts:
    """A checkpoint, or one rank's part of it, in pieces.

    Attributes:
        tensors: of the model and of its optimizers; not copied.
        outline: where they belong.
        rest: everything else.
    """

    tensors: dict[Path, Tensor] = field(default_factory=dict)
    outline: Outline = field(default_factory=Outline)
    rest: dict[str, Any] = field(default_factory=dict)


def split_checkpoint(checkpoint: Mapping[str, Any], names: Names = ()) -> CheckpointParts:
    """The inverse of :func:`merge_checkpoint`; changes nothing and copies nothing.

    Args:
        checkpoint: what Lightning saves; on a rank that holds a part of the model, with that part of ``state_dict``
            and of each optimizer's ``state``.
        names: of the optimizers' parameters. A number without one is its own name.

    Raises:
        ValueError: a tensor has no values yet, or an optimizer's state has something else than tensors and plain data.
    """
    parts = CheckpointParts(rest=dict(checkpoint))
    if "state_dict" in checkpoint:
        parts.rest["state_dict"] = _split_model(checkpoint["state_dict"], parts)
    if "optimizer_states" in checkpoint:
        left = []
        for index, state in enumerate(checkpoint["optimizer_states"]):
            known = names[index] if index < len(names) else {}
            left.append(_split_optimizer(state, str(index), known, parts))
        parts.rest["optimizer_states"] = left
    return parts


def merge_checkpoint(
    rest: Mapping[str, Any],
    outline: Outline,
    tensors: Mapping[Path, Tensor],
) -> dict[str, Any]:
    """A checkpoint as Lightning saves it; names that shared memory share it again."""
    checkpoint = dict(rest)
    if "state_dict" in rest:
        state_dict = {}
        for name, path in outline.state_dict.items():
            if path is None:
                state_dict[name] = rest["state_dict"][name]
            else:
                state_dict[name] = tensors[path]
        checkpoint["state_dict"] = state_dict
    if "optimizer_states" in rest:
        optimizer_states = []
        for left, encoded in zip(rest["optimizer_states"], outline.optimizers, strict=True):
            states = {number: decode(value, tensors) for number, value in encoded.items()}
            states.update(left["state"])
            optimizer_states.append({**left, "state": states})
        checkpoint["optimizer_states"] = optimizer_states
    return checkpoint


def names_of(module: nn.Module, groups: Sequence[Sequence[Tensor]]) -> list[dict[int, str]]:
    """The :data:`Names` of optimizers whose parameters, of all groups in order, are ``groups``."""
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    found = []
    for parameters in groups:
        names: dict[int, str] = {}
        for number, parameter in enumerate(parameters):
            if id(parameter) in name_of:
                names[number] = name_of[id(parameter)]
        found.append(names)
    return found


def _split_model(state: Mapping[str, Any], parts: CheckpointParts) -> dict[str, Any]:
    """Add the tensors of a ``state_dict`` to ``parts``; returns what is left of it."""
    left: dict[str, Any] = {}
    paths: dict[Any, Path] = {}  # memory -> path: of names of tied weights the first one's counts
    for name, value in state.items():
        if not _is_plain(value, name):
            left[name] = value
            parts.outline.state_dict[name] = None
            continue
        path = paths.setdefault(_memory_of(value), ("state_dict", name))
        parts.tensors[path] = value
        parts.outline.state_dict[name] = path
    return left


def _split_optimizer(
    state: Mapping[str, Any], index: str, names: Mapping[int, str], parts: CheckpointParts
) -> dict[str, Any]:
    """Add the tensors of an optimizer's state to ``parts``; returns what is left of it."""
    encoded: dict[int, Any] = {}
    left: dict[Any, Any] = {}
    # A key that is no number of a parameter is an optimizer's own: its value stays in the rest.
    for number, value in state["state"].items():
        if not isinstance(number, int):
            left[number] = value
            continue
        name = names.get(number, f"parameter {number}")
        encoded[number] = _encode(value, ("optimizer_states", index, name), parts.tensors)
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
    if type(value) not in (Tensor, nn.Parameter):
        return False
    return value.layout is torch.strided and not value.is_quantized


def _memory_of(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory."""
    if tensor.numel() == 0:  # it has no memory, nor an address
        return id(tensor)
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )


def _encode(value: Any, path: Path, tensors: dict[Path, Tensor]) -> list[Any]:
    """The state of one parameter as JSON, with its tensors moved to ``tensors``."""
    own: dict[Path, Tensor] = {}
    try:
        plain = encode(value, own, path)
        for tensor_path, tensor in own.items():
            name = ".".join(tensor_path)
            if not _is_plain(tensor, name):
                kind = type(tensor).__name__
                raise UnknownTypeError(tensor_path, f"{kind} ({tensor.layout})")
    except UnknownTypeError as error:
        raise ValueError(
            f"{error}. A sharded checkpoint has tensors, numbers, texts, None, and lists, tuples and dicts of these in "
            "optimizer states; save with sharded=False."
        ) from error
    tensors.update(own)
    return plain
