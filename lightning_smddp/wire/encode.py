"""The one encoder: nested values as plain data, which JSON carries, and tensors. Nothing decoded is ever unpickled.

    {"lr": 0.1, "momentum": tensor}  <->  ["dict", [[["plain", "lr"], ["plain", 0.1]],
                                                    [["plain", "momentum"], ["tensor", ["momentum"]]]]]
                                          {("momentum",): tensor}

A sharded checkpoint keeps this form of an optimizer's state: what is written here has to stay readable.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Path = tuple[str, ...]
"""Keys and positions, from the outside in."""


class Form(NamedTuple):
    """A row of :data:`FORMS`.

    Attributes:
        name: of the form, in the encoded value.
        types: of the values that have it.
        in_values: whether it is among values, which come back as what they were. So subclasses are not, unless
            ``of_subclasses``: of a list's subclass a list would come back.
        in_structures: whether it, and any subclass, is among structures: batches, and what a step shows. There any
            mapping, sequence and dataclass is taken for a dict, list or tuple, as the receiver has a pattern.
        of_subclasses: see above.
    """

    name: str
    types: tuple[type, ...]
    in_values: bool
    in_structures: bool
    of_subclasses: bool = False

    def fits(self, kind: type, is_structure: bool) -> bool:
        """Whether values of type ``kind`` have this form."""
        if is_structure:
            return self.in_structures and issubclass(kind, self.types)
        if not self.in_values:
            return False
        if self.of_subclasses:
            return issubclass(kind, self.types)
        return kind in self.types


# What can be sent and stored. The first row that fits counts: a number of numpy's is also one of Python's.
FORMS = (
    Form(
        "scalar",
        (np.bool_, np.number, np.str_, np.bytes_, np.datetime64),
        True,
        True,
        of_subclasses=True,
    ),
    Form("plain", (type(None), bool, str), True, True),
    Form("int", (int,), True, True),
    Form("float", (float,), True, True),
    Form("tensor", (Tensor,), True, True, of_subclasses=True),
    Form("array", (np.ndarray,), False, True),
    Form("bytes", (bytes,), True, False),
    Form("path", (PurePath,), True, False, of_subclasses=True),
    Form("dtype", (torch.dtype,), True, False),
    Form("dict", (dict, OrderedDict, defaultdict, Mapping), True, True),
    Form("list", (list,), True, True),
    Form("tuple", (tuple,), True, True),
    Form("set", (set,), True, False),
    Form("frozenset", (frozenset,), True, False),
)
# How a container is made of its decoded members. A dict has keys as well.
_CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_INT64_END = 2**63  # one beyond the largest number that 8 bytes carry


class UnknownTypeError(ValueError):
    """Something that has no form.

    Attributes:
        path: keys and positions of it, from the outside in.
        kind: its type, with its module.
        problem: what is wrong, with the cure: a sentence of which ``path`` is the subject.
    """

    def __init__(self, path: tuple[Any, ...], kind: str, problem: str = "") -> None:
        where = ".".join([str(key) for key in path]) or "the value"
        super().__init__(f"{where} is a {kind}")
        self.path = path
        self.kind = kind
        self.problem = problem


# Looked up for each value of each batch, of a few types in all.
@functools.lru_cache(maxsize=1024)
def _form_of(kind: Any, is_structure: bool) -> str:
    """The form of values of type ``kind``; empty if there is none."""
    for form in FORMS:
        if form.fits(kind, is_structure):
            return form.name
    if is_structure and dataclasses.is_dataclass(kind):
        return "dataclass"
    return ""


class Encoder:
    """Encodes values, and collects what does not go into plain data.

    Args:
        is_structure: which types are taken, see :class:`Form`. Numbers of structures go to ``numbers``: so the encoded
            value is the same at every step, and need not be sent again.

    Attributes:
        tensors: found, each under its path.
        numbers: found, each as 8 bytes.
    """

    def __init__(self, is_structure: bool = False) -> None:
        self.is_structure = is_structure
        self.tensors: dict[Path, Tensor] = {}
        self.numbers: list[bytes] = []

    def encode(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """``value`` as plain data: the name of its form, and its contents. Plain ones of structures are bare.

        Raises:
            UnknownTypeError: something in it has no form, or is a mapping's key in a structure and not plain.
        """
        kind: Any = type(value)  # hashable, though mypy doubts it
        form = _form_of(kind, self.is_structure)
        if form == "plain":
            return self._plain(value)
        if form in ("int", "float"):
            return self._number(form, value)
        if form == "tensor":
            return ["tensor", self._keep(value, path)]
        if form == "dict":
            return ["dict", self._members(value, path)]
        if form in _CONTAINERS:
            members = [self.encode(member, (*path, index)) for index, member in enumerate(value)]
            return [form, members]
        if form == "dataclass":
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return ["dict", self._members(fields, path)]
        if form == "scalar":
            return self.encode(value.item(), path)
        if form == "array" and value.dtype.kind in "biufc":  # bool, int, unsigned, float, complex
            contiguous = np.ascontiguousarray(value)
            return ["array", self._keep(torch.from_numpy(contiguous), path)]
        return self._rare(form, value, path)

    def _rare(self, form: str, value: Any, path: tuple[Any, ...]) -> list[Any]:
        """Of the forms that values alone have, and of what has none."""
        if form == "bytes":
            return ["bytes", base64.b64encode(value).decode()]
        if form == "path":
            return ["path", str(value)]
        if form == "dtype":
            return ["dtype", name_of_dtype(value)]
        name = type(value).__name__
        raise UnknownTypeError(
            path,
            name_of_type(value),
            f"is a {name}, which cannot be sent to other ranks. "
            "Make it a tensor, a number, a string, or a dict, list or tuple of these.",
        )

    def _plain(self, value: Any) -> Any:
        if self.is_structure:
            return value
        return ["plain", value]

    def _number(self, form: str, value: Any) -> Any:
        if not self.is_structure:
            return ["plain", value]
        if form == "float":
            packed = struct.pack("<d", value)
        elif -_INT64_END <= value < _INT64_END:
            packed = struct.pack("<q", value)
        else:
            return int(value)  # too large for 8 bytes: it stays in the encoded value
        self.numbers.append(packed)
        return [form, len(self.numbers) - 1]

    def _keep(self, tensor: Tensor, path: tuple[Any, ...]) -> list[str]:
        """Put ``tensor`` aside; returns the name that stands for it."""
        if self.is_structure and not is_dense(tensor):
            problem = f"is a {_kind_of_tensor(tensor)} tensor; only dense tensors can be sent to other ranks."
            raise UnknownTypeError(path, name_of_type(tensor), problem)
        name = tuple([str(key) for key in path])
        assert name not in self.tensors
        self.tensors[name] = tensor
        return list(name)

    def _members(self, mapping: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Any]:
        # A tensor is kept under the texts of the keys above it. Where two keys have one text, such as 1 and "1", their
        # types belong to it.
        types = {type(key) for key in mapping}
        with_types = len(types) > 1 and len({str(key) for key in mapping}) < len(mapping)
        encoded = []
        for key, member in mapping.items():
            name: Any = key
            if with_types:
                name = f"{type(key).__name__} {key}"
            own = (*path, name)
            encoded.append([self._key(key, own), self.encode(member, own)])
        return encoded

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if not self.is_structure:
            return self.encode(key, (*path, "key"))
        if type(key) is str:  # nearly all are
            return key
        if not isinstance(key, (bool, int, float, str, type(None))):
            name = type(key).__name__
            problem = f"has the key {key!r}, a {name}, which cannot be sent to other ranks. Use strings or numbers."
            raise UnknownTypeError(path[:-1], name_of_type(key), problem)
        return key


def encode(value: Any, tensors: dict[Path, Tensor], path: Path = ()) -> list[Any]:
    """``value`` as plain data, with its tensors moved to ``tensors``, each under its path below ``path``.

    Raises:
        UnknownTypeError: something in it is none of the values of :data:`FORMS`; says where it is, and its type.
    """
    encoder = Encoder()
    encoder.tensors = tensors
    plain: list[Any] = encoder.encode(value, path)
    return plain


def decode(plain: Any, tensors: Mapping[Path, Tensor], numbers: bytes = b"") -> Any:
    """The inverse of :func:`encode`; all mappings come back as dicts.

    Args:
        plain: what was encoded.
        tensors: the encoder's.
        numbers: the encoder's, one behind the other.
    """
    if not isinstance(plain, list):
        return plain
    form, content = plain
    if form == "plain":
        return content
    if form == "tensor":
        return tensors[tuple(content)]
    if form == "dict":
        members = {}
        for key, member in content:
            members[decode(key, tensors, numbers)] = decode(member, tensors, numbers)
        return members
    if form in _CONTAINERS:
        return _CONTAINERS[form]([decode(member, tensors, numbers) for member in content])
    if form == "int":
        return struct.unpack_from("<q", numbers, 8 * content)[0]
    if form == "float":
        return struct.unpack_from("<d", numbers, 8 * content)[0]
    if form == "array":
        return tensors[tuple(content)].cpu().numpy()
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


def bits_of(number: float) -> int:
    """The bits of a float as an integer, so that a message of integers carries it as it is."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


def float_of(bits: int) -> float:
    """The inverse of :func:`bits_of`."""
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)


def name_of_type(value: Any) -> str:
    """Module and name of the type of ``value``, for messages."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_dense(tensor: Tensor) -> bool:
    """Whether it has memory of its own with one value for each element, as a message has."""
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided


def _kind_of_tensor(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    if tensor.is_nested:
        return "nested"
    return f"{tensor.layout} {tensor.dtype}"
