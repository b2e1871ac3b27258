"""Nested values as JSON and a table of tensors: how they are sent and stored without pickle."""

from __future__ import annotations

import base64
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

Path = tuple[str, ...]
"""Keys and positions, from the outside in."""
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = (dict, OrderedDict, defaultdict)


class UnknownTypeError(ValueError):
    """Something that has no form of its own.

    Attributes:
        kind: the name of its type.
    """

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(f"{'.'.join(path) or 'the value'} is a {kind}")
        self.kind = kind


def encode(value: Any, tensors: dict[Path, Tensor], path: Path = ()) -> list[Any]:
    """``value`` as JSON, with its tensors moved to ``tensors``, each under its path below ``path``.

    None, bool, int, float, str, bytes, paths, dtypes, numbers of numpy, tensors, and lists, tuples, sets and dicts of
    these; subclasses of containers, which would come back as something else, are not among them.

    Raises:
        UnknownTypeError: something else is in it, with its path.
    """
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        value = value.item()
    kind = type(value)
    if kind in _PLAIN:
        return ["plain", value]
    if isinstance(value, Tensor):
        assert path not in tensors
        tensors[path] = value
        return ["tensor", list(path)]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if kind is torch.dtype:
        return ["dtype", name_of_dtype(value)]
    if kind in _SEQUENCES.values():
        return [kind.__name__, [encode(member, tensors, (*path, str(i))) for i, member in enumerate(value)]]
    if kind in _MAPPINGS:
        names = [str(key) for key in value]
        if len(set(names)) < len(names):  # 1 and "1"
            names = [f"{type(key).__name__} {key}" for key in value]
        members = [encode(member, tensors, (*path, name)) for name, member in zip(names, value.values(), strict=True)]
        keys = [encode(key, tensors, (*path, name, "key")) for name, key in zip(names, value, strict=True)]
        return ["dict", [list(pair) for pair in zip(keys, members, strict=True)]]
    raise UnknownTypeError(path, f"{kind.__module__}.{kind.__qualname__}")


def decode(plain: Any, tensors: Mapping[Path, Tensor]) -> Any:
    """The inverse of :func:`encode`; all mappings come back as dicts."""
    kind, content = plain
    if kind == "plain":
        return content
    if kind == "tensor":
        return tensors[tuple(content)]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "path":
        return FilePath(content)
    if kind == "dtype":
        return dtype_of(content)
    if kind == "dict":
        return {decode(key, tensors): decode(member, tensors) for key, member in content}
    return _SEQUENCES[kind](decode(member, tensors) for member in content)


def name_of_dtype(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of :func:`name_of_dtype`. Raises ``ValueError`` for what is no dtype of this torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}. Run one version on every rank.")
    return found
