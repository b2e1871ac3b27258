"""``algorithm="auto"``: a short timing on this very cluster decides.

The result is a :class:`Plan`: for each bucket size an algorithm, and the size of DDP's buckets. All ranks time the
same calls and agree on the slowest rank's times, so all of them choose the same. Plans are cached.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.communication.algorithms import NAMES, TwoLevel
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.compression import Compression
from lightning_smddp.wire.broadcast import broadcast_json

DEFAULT_BUCKET_MB = 25.0  # DDP's own
_BUCKET_CHOICES_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
_TIMED_SIZES = (64 * 2**10, 1 * 2**20, 8 * 2**20)
_SECONDS_EACH = 0.15  # for one algorithm at one size
_TIMING_ERROR = 1.05
_LIMITLESS = 2**62
_TIMING_SLOT = 2**30  # no bucket has so high a number


@dataclass(frozen=True)
class Plan:
    """What was chosen, and why.

    Attributes:
        table: up to so many bytes, this algorithm; ascending, the last entry takes the rest.
        bucket_cap_mb: size of DDP's buckets; None leaves it to DDP.
        seconds: by algorithm, the measured time for each of ``sizes``; empty when nothing was timed.
        sizes: bytes.
        source: ``"measured"``, ``"cached"``, or ``"given"``.
    """

    table: list[tuple[int, str]]
    bucket_cap_mb: float | None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    source: str = "given"

    def describe(self) -> str:
        """Which algorithm for which sizes, and where that is from, in one line."""
        parts, lower = [], 0
        for limit, name in self.table:
            sizes = "all sizes"
            if limit < _LIMITLESS:
                sizes = f"up to {_mib(limit)}"
            elif lower:
                sizes = f"above {_mib(lower)}"
            parts.append(f"{name} ({sizes})")
            lower = limit
        _, chosen = self.table[-1]
        if "native" in self.seconds and self.sizes and chosen != "native":
            gain = self.seconds["native"][-1] / self.seconds[chosen][-1]
            parts.append(f"{gain:.1f}x native at {_mib(self.sizes[-1])}")
        return f"{', '.join(parts)}; {self.source}"


def given_plan(name: str, bucket_cap_mb: float | None) -> Plan:
    """The user's word: one algorithm for all sizes."""
    return Plan([(_LIMITLESS, name)], bucket_cap_mb)


def choose_plan(
    communicator: Communicator,
    module: nn.Module,
    compression: Compression | None,
    bucket_cap_mb: float | None,
    cache: Path | None,
) -> Plan:
    """The fastest plan for ``module``'s gradients on this cluster, from the cache or measured. Collective.

    Args:
        communicator: the job's groups.
        module: whose gradients.
        compression: what goes over the network; never chosen here, as it changes results.
        bucket_cap_mb: the user's choice, which is kept; None includes it in the search.
        cache: file of earlier plans, read and written by the first rank; None for neither.
    """
    if communicator.world_size == 1:
        return given_plan("native", bucket_cap_mb)
    key = plan_key(communicator, module, compression, bucket_cap_mb)
    found = None
    if communicator.rank == 0:
        found = _read(cache).get(key)
    cached = _plan_of(broadcast_json(found, communicator.group, communicator.device))
    if cached is not None:
        return cached
    plan = _measure(communicator, module, compression, bucket_cap_mb)
    if communicator.rank == 0 and cache is not None:
        _write(cache, key, plan)
    return plan


def plan_key(
    communicator: Communicator,
    module: nn.Module,
    compression: Compression | None,
    bucket_cap_mb: float | None,
) -> str:
    """A digest of all that a plan depends on: gradients, cluster, versions, the user's choices."""
    from lightning_smddp import __version__

    topology = communicator.topology
    gpu, compressed = "", None
    if communicator.device.type == "cuda":
        gpu = torch.cuda.get_device_name(communicator.device)
    if compression is not None:
        compressed = asdict(compression)
    facts = [
        [(list(p.shape), str(p.dtype)) for p in module.parameters() if p.requires_grad],
        [list(ranks) for ranks in topology.nodes],
        communicator.device.type,
        gpu,
        [os.cpu_count(), torch.get_num_threads(), communicator.zero_copy, communicator.shared_memory_refusal],
        [torch.__version__, __version__],
        compressed,
        bucket_cap_mb,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/lightning_smddp/plans.json``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning_smddp" / "plans.json"


def _measure(
    communicator: Communicator,
    module: nn.Module,
    compression: Compression | None,
    bucket_cap_mb: float | None,
) -> Plan:
    gradients = [p for p in module.parameters() if p.requires_grad]
    gradient_bytes = sum(p.numel() * p.dtype.itemsize for p in gradients)
    sizes = [size for size in _TIMED_SIZES if size <= 2 * gradient_bytes] or [_TIMED_SIZES[0]]
    times = {name: time_algorithm(name, communicator, compression, sizes) for name in communicator.available()}
    table = _table(sizes, times)
    if bucket_cap_mb is None:
        bucket_cap_mb = _bucket_size(gradient_bytes, sizes, times[table[-1][1]], table[-1][1])
    return Plan(table, bucket_cap_mb, times, sizes, "measured")


def time_algorithm(
    name: str, communicator: Communicator, compression: Compression | None, sizes: list[int]
) -> list[float]:
    """Seconds of an all-reduce by ``name`` for each size: the median, of the slowest rank. Collective."""
    if compression is not None and compression.method == "powersgd":
        compression = None  # a flat tensor has no matrices: only the algorithms compare
    algorithm = communicator.algorithm(name, compression)
    medians = []
    for size in sizes:
        tensor = torch.zeros(size // 4, device=communicator.device)
        first = communicator.maximum([_call_s(algorithm, tensor), _call_s(algorithm, tensor)])
        repeats = max(3, min(20, int(_SECONDS_EACH / max(first[1], 1e-6))))
        seconds = sorted(_call_s(algorithm, tensor) for _ in range(repeats))
        medians.append(seconds[repeats // 2])
    if isinstance(algorithm, TwoLevel):
        algorithm.drain()
    medians = communicator.maximum(medians)
    algorithm.close()
    return medians


def _call_s(algorithm: Any, tensor: Tensor) -> float:
    def call() -> None:
        reduce_once(algorithm, tensor, _TIMING_SLOT)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    return _timed(call)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _table(sizes: list[int], times: dict[str, list[float]]) -> list[tuple[int, str]]:
    """For each timed size the fastest algorithm, limits halfway (geometrically) between sizes, runs merged."""
    best = [min(times, key=lambda name: times[name][index]) for index in range(len(sizes))]
    between = [int((size * larger) ** 0.5) for size, larger in itertools.pairwise(sizes)]
    table: list[tuple[int, str]] = []
    for name, limit in zip(best, [*between, _LIMITLESS], strict=True):
        if table and table[-1][1] == name:
            table.pop()
        table.append((limit, name))
    return table


def _bucket_size(gradient_bytes: int, sizes: list[int], seconds: list[float], name: str) -> float:
    """MiB of DDP's buckets with which a step stands still for the shortest time, by what ``name`` was measured to take.

    The times' line gives the cost of a bucket and of a byte. Overlapped buckets hide behind backward but for the cost
    of each and all bytes of the last one: the least is at ``sqrt(gradient_bytes * cost of a bucket / cost of a byte)``.
    Of buckets that are not overlapped all bytes stand in the way.
    """
    if len(sizes) < 2:
        return DEFAULT_BUCKET_MB
    byte_s = max((seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]), 1e-13)
    bucket_s = max(seconds[0] - byte_s * sizes[0], 1e-7)
    overlapped = name != "shared_memory"

    def cost(megabytes: float) -> float:
        bucket_bytes = int(megabytes * 2**20)
        count = max(1, math.ceil(gradient_bytes / bucket_bytes))
        visible_bytes = gradient_bytes
        if overlapped:
            visible_bytes = min(bucket_bytes, gradient_bytes)
        return count * bucket_s + visible_bytes * byte_s

    # Of those within the timing's own error the one nearest to DDP's: large buckets keep gradients longer in memory.
    bound = _TIMING_ERROR * min(map(cost, _BUCKET_CHOICES_MB))
    close = [megabytes for megabytes in _BUCKET_CHOICES_MB if cost(megabytes) <= bound]
    return min(close, key=lambda megabytes: abs(megabytes - DEFAULT_BUCKET_MB))


def _mib(size: int) -> str:
    if size < 2**20:
        return f"{size / 2**10:.3g} KiB"
    return f"{size / 2**20:.3g} MiB"


def _read(cache: Path | None) -> dict[str, Any]:
    if cache is None or not cache.exists():
        return {}
    try:
        plans = json.loads(cache.read_text())
    except (OSError, ValueError):  # unreadable or torn: measured anew and replaced
        return {}
    if not isinstance(plans, dict):
        return {}
    return plans


def _plan_of(entry: Any) -> Plan | None:
    """A plan from its JSON; None if it is none."""
    try:
        table = [(int(limit), str(name)) for limit, name in entry["table"]]
        plan = Plan(**{**entry, "table": table, "source": "cached"})
    except (KeyError, TypeError, ValueError):
        return None
    if not table or any(name not in NAMES for _, name in table):
        return None
    return plan


def _write(cache: Path, key: str, plan: Plan) -> None:
    """Add ``plan`` to the file, replacing it whole; a cache that cannot be written costs time only."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            file = Path(folder, "plans.json")
            file.write_text(json.dumps({**_read(cache), key: asdict(plan)}))
            os.replace(file, cache)
    except OSError as error:
        warnings.warn(f"The plan could not be cached in {cache}: {error}", stacklevel=2)
