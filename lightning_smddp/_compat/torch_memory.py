"""What torch's CPU allocator gives out and gets back, one by one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "lightning_smddp: "


@dataclass
class MemoryRecord:
    """Marks and allocations in the order of time.

    Attributes:
        entries: names of marks, and bytes: of what was allocated, negative where it was freed. Memory from before the
            record counts for nothing, also where it is freed.
    """

    entries: list[str | int] = field(default_factory=list)

    @staticmethod
    def mark(name: str) -> None:
        """Note that something begins here."""
        with record_function(f"{_MARK}{name}"):
            pass


@contextmanager
def recorded_memory() -> Iterator[MemoryRecord]:
    """Record what the CPU allocator does within; entries are there afterwards.

    The profiler's events have it, which no public function gives one by one: those of ``key_averages`` are sums, and
    ``export_chrome_trace`` writes a file. Remove when there is one.
    """
    record = MemoryRecord()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _without_stderr():
        profiler.start()
    try:
        yield record
    finally:
        with _without_stderr():
            profiler.stop()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        name = event.name()
        if name == "[memory]" and event.device_type().name == "CPU":
            record.entries.append(event.nbytes())  # type: ignore[attr-defined]  # missing in torch's stubs
        elif name.startswith(_MARK):
            record.entries.append(name.removeprefix(_MARK))


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Around the profiler's start and stop, which it writes to the process's stderr whatever torch's log level is."""
    sys.stderr.flush()
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)
