"""Counts what makes the host wait for the simulated device, by kind and source line."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])
_OURS = str(Path(_ROOT, "lightning_smddp"))
_DEVICE = [str(path) for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]
_SKIPPED = ("contextlib.py", "/torch/", *_DEVICE)

_lock = threading.Lock()
_counts: Counter[tuple[str, str]] | None = None


def note(kind: str) -> None:
    """The device's callback: the host waits now, in the caller's line."""
    if _counts is not None:
        line = where()
        with _lock:
            _counts[kind, line] += 1


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Count in all threads: (kind, "file:line function") -> times.

    Kinds are ``item``, ``copy to the host``, ``copy from the host`` (pageable), ``synchronize``, ``barrier`` and the
    names of operators whose results' sizes depend on values.
    """
    global _counts
    before, _counts = _counts, Counter()
    try:
        yield _counts
    finally:
        _counts = before


def in_package(counts: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Those of this package's own lines."""
    return Counter({key: times for key, times in counts.items() if key[1].startswith("lightning_smddp/")})


def table(counts: Counter[tuple[str, str]]) -> str:
    """One line for each place, the most frequent first."""
    return "\n".join(f"{times:4d} x {kind:20s} {line}" for (kind, line), times in counts.most_common())


def where() -> str:
    """The innermost line of this package among the callers; else the innermost that is not torch's."""
    frame = sys._getframe().f_back
    first = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            return f"{code.co_filename[len(_ROOT) + 1 :]}:{frame.f_lineno} {code.co_name}"
        if not first and not any(part in code.co_filename for part in _SKIPPED):
            name = code.co_filename.rpartition("site-packages/")[2].removeprefix(_ROOT + "/")
            first = f"{name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return first or "(no Python line)"
