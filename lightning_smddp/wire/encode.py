"""The one encoder: nested values as plain data, which JSON carries, and tensors. Nothing decoded is ever unpickled.

    {"lr": 0.1, "momentum": tensor}  <->  ["dict", [[["plain", "lr"], ["plain", 0.1]],
                                                    [["plain", "momentum"], ["tensor", ["momentum"]]]]]
                                          {("momentum",): tensor}

A sharded checkpoint keeps this form of an optimizer's state: what is written here has to stay readable.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

Path = tuple[str, ...]
"""Keys and positions, from the outside in."""

# What can be sent and stored, by the name of its form: values come back as what they were. So subclasses have none, but
# in the first row: of a list's subclass a list would come back. The first one that fits counts, as a number of numpy's
# is also one of Python's.
_OF_SUBCLASSES: dict[str, tuple[type, ...]] = {
    "scalar": (np.bool_, np.number, np.str_, np.bytes_, np.datetime64),
    "tensor": (Tensor,),
    "path": (PurePath,),
}
FORMS: dict[type, str] = {
    **dict.fromkeys((type(None), bool, str, int, float), "plain"),
    bytes: "bytes",
    torch.dtype: "dtype",
    **dict.fromkeys((dict, OrderedDict, defaultdict), "dict"),
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
}
# How a container is made of its decoded members. A dict has keys as well.
_CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


class UnknownTypeError(ValueError):
    """Something that has no form.

    Attributes:
        path: keys and positions of it, from the outside in.
        kind: its type, with its module.
    """

    def __init__(self, path: tuple[Any, ...], kind: str) -> None:
        where = ".".join([str(key) for key in path]) or "the value"
        super().__init__(f"{where} is a {kind}")
        self.path = path
        self.kind = kind


def _form_of(value: Any) -> str:
    """The form of ``value``; empty if there is none."""
    for form, types in _OF_SUBCLASSES.items():
        if isinstance(value, types):
            return form
    return FORMS.get(type(value), "")


def encode(value: Any, tensors: dict[Path, Tensor], path: tuple[Any, ...] = ()) -> list[Any]:
    """``value`` as plain data (the name of its form, and its contents), with its tensors moved to ``tensors``.

    Each is there under its path below ``path``.

    Raises:
        UnknownTypeError: something in it has none of the :data:`FORMS`; says where it is, and its type.
    """
    form = _form_of(value)
    if form == "plain":
        return ["plain", value]
    if form == "tensor":
        name = tuple([str(key) for key in path])
        assert name not in tensors
        tensors[name] = value
        return ["tensor", list(name)]
    if form == "dict":
        return ["dict", _members(value, tensors, path)]
    if form in _CONTAINERS:
        return [form, [encode(member, tensors, (*path, index)) for index, member in enumerate(value)]]
    if form == "scalar":
        return encode(value.item(), tensors, path)
    if form == "bytes":
        return ["bytes", base64.b64encode(value).decode()]
    if form == "path":
        return ["path", str(value)]
    if form == "dtype":
        return ["dtype", name_of_dtype(value)]
    raise UnknownTypeError(path, name_of_type(value))


def _members(mapping: Mapping[Any, Any], tensors: dict[Path, Tensor], path: tuple[Any, ...]) -> list[Any]:
    # A tensor is kept under the texts of the keys above it. Where two keys have one text, such as 1 and "1", their
    # types belong to it.
    types = {type(key) for key in mapping}
    with_types = len(types) > 1 and len({str(key) for key in mapping}) < len(mapping)
    encoded = []
    for key, member in mapping.items():
        name: Any = f"{type(key).__name__} {key}" if with_types else key
        own = (*path, name)
        encoded.append([encode(key, tensors, (*own, "key")), encode(member, tensors, own)])
    return encoded


def decode(plain: list[Any], tensors: Mapping[Path, Tensor]) -> Any:
    """The inverse of :func:`encode`; all mappings come back as dicts.

    Args:
        plain: what was encoded.
        tensors: what was found.
    """
    form, content = plain
    if form == "plain":
        return content
    if form == "tensor":
        return tensors[tuple(content)]
    if form == "dict":
        return {decode(key, tensors): decode(member, tensors) for key, member in content}
    if form in _CONTAINERS:
        return _CONTAINERS[form]([decode(member, tensors) for member in content])
    if form == "bytes":
        return base64.b64decode(content)
    if form == "path":
        return FilePath(content)
    assert form == "dtype", form
    return dtype_of(content)


# ---- one message of bytes ----


def pack(value: Any) -> Tensor:
    """``value`` (see :data:`FORMS`; tensors of the CPU) as one tensor of bytes; tensors that are equal are in it once.

    The length of the header (8 bytes), the header, the tensors.
    """
    tensors: dict[Path, Tensor] = {}
    plain = encode(value, tensors)
    offsets: dict[bytes, int] = {}  # by the tensors' bytes, in the order in which these follow the header
    specs = []
    end = 0
    for path, tensor in tensors.items():
        flat = tensor.detach().contiguous().flatten()
        data = flat.view(torch.uint8).numpy().tobytes()
        if data not in offsets:
            offsets[data] = end
            end += len(data)
        dtype = name_of_dtype(tensor.dtype)
        specs.append([path, dtype, list(tensor.shape), offsets[data], len(data)])
    header = json.dumps([plain, specs]).encode()
    length = len(header).to_bytes(8, "little")
    message = length + header + b"".join(offsets)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """The inverse of :func:`pack`; what was equal is one tensor."""
    message = np.asarray(data.cpu()).tobytes()
    header_length = int.from_bytes(message[:8], "little")
    begin = 8 + header_length  # of the tensors
    plain, specs = json.loads(message[8:begin])
    found: dict[tuple[str, int, int], Tensor] = {}  # by dtype, offset and length
    tensors: dict[Path, Tensor] = {}
    for path, name, shape, offset, length in specs:
        key = (name, offset, length)
        if key not in found:
            start = begin + offset
            found[key] = _tensor_of(message[start : start + length], dtype_of(name))
        tensors[tuple(path)] = found[key].view(shape)
    return decode(plain, tensors)


def _tensor_of(data: bytes, dtype: torch.dtype) -> Tensor:
    if not data:  # `frombuffer` refuses
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)


# ---- leaves ----


def name_of_dtype(dtype: torch.dtype) -> str:
    """As torch spells it without its module: ``"float32"``, so that JSON carries it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of :func:`name_of_dtype`. Raises ``ValueError`` for what is no dtype of this torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}. Run one version on every rank.")
    return found


def name_of_type(value: Any) -> str:
    """Module and name of the type of ``value``, for messages."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_dense(tensor: Tensor) -> bool:
    """Whether it has memory of its own with one value for each element, as a message has."""
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided
