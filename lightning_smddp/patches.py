"""Attributes that are others for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

Patch: TypeAlias = tuple[dict[Any, Any], Any, Any]
"""A dict, such as ``vars`` of an object, a key, and what takes the place of what is there."""

_MISSING = object()


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """In this context ``patches`` are in place; behind it what was there, if they still are.

    What was set or removed within stays so.
    """
    before = [(attributes.get(key, _MISSING), attributes, key, value) for attributes, key, value in patches]
    for _, attributes, key, value in before:
        attributes[key] = value
    try:
        yield
    finally:
        for known, attributes, key, value in before:
            if attributes.get(key) is value:
                attributes[key] = known
                if known is _MISSING:
                    del attributes[key]
