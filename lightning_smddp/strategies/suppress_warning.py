"""Advice of Lightning's that is wrong where it would be given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_warning(message: str) -> Iterator[None]:
    """In this context no warning whose text begins with ``message``, a regular expression."""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message)
    entry = warnings.filters[0]
    try:
        yield
    finally:
        if entry not in before:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # a list; typeshed shows a Sequence
