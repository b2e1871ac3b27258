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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.communication.algorithms import NAMES, Algorithm, TwoLevel
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.objects import broadcast

DEFAULT_BUCKET_MB = 25.0  # DDP's own
_BUCKET_CHOICES_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
_TIMED_SIZES = (64 * 2**10, 1 * 2**20, 8 * 2**20)  # bytes
_SECONDS_EACH = 0.15  # for one algorithm at one size
_LEAST_REPEATS, _MOST_REPEATS = 3, 20
_TIMING_ERROR = 1.05  # costs that differ by less than this factor may be equal
_LIMITLESS = 2**62  # bytes: above any bucket
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
        parts = []
        lower = 0
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
    # Each node may have a cache of its own, so the first rank's counts for all of them.
    entry = None
    if communicator.rank == 0:
        entry = _read(cache).get(key)
    entry = broadcast(entry, communicator.group)
    cached = _plan_of(entry)
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

    gradients = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradients.append((list(parameter.shape), str(parameter.dtype)))
    gpu = ""
    if communicator.device.type == "cuda":
        gpu = torch.cuda.get_device_name(communicator.device)
    compressed = None
    if compression is not None:
        compressed = asdict(compression)
    # What changes the times or the choice. A plan of other facts is not found: it has another key.
    facts = [
        gradients,
        [list(ranks) for ranks in communicator.topology.nodes],
        communicator.device.type,
        gpu,
        [os.cpu_count(), torch.get_num_threads(), communicator.zero_copy, communicator.shared_memory_refusal],
        [torch.__version__, __version__],
        compressed,
        bucket_cap_mb,
    ]
    text = json.dumps(facts)
    return hashlib.sha256(text.encode()).hexdigest()


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
    gradient_bytes = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradient_bytes += parameter.numel() * parameter.dtype.itemsize
    # A bucket is never larger than all gradients together.
    sizes = [size for size in _TIMED_SIZES if size <= 2 * gradient_bytes]
    if not sizes:
        sizes = [_TIMED_SIZES[0]]
    times = {}
    for name in communicator.available():
        times[name] = time_algorithm(name, communicator, compression, sizes)
    table = _table(sizes, times)
    if bucket_cap_mb is None:
        _, for_large = table[-1]
        bucket_cap_mb = _bucket_size(gradient_bytes, sizes, times[for_large], for_large)
    return Plan(table, bucket_cap_mb, times, sizes, "measured")


def time_algorithm(
    name: str,
    communicator: Communicator,
    compression: Compression | None,
    sizes: list[int],
) -> list[float]:
    """Seconds of an all-reduce by ``name`` for each size: the median, of the slowest rank. Collective."""
    if compression is not None and compression.method == "powersgd":
        compression = None  # a flat tensor has no matrices: only the algorithms compare
    algorithm = communicator.algorithm(name, compression)
    medians = []
    for size in sizes:
        tensor = torch.zeros(size // 4, device=communicator.device)
        # The first call maps memory and connects, the second tells how many more there is time for. That number comes
        # from the slowest rank's time: all ranks have to make as many calls.
        warm_up = [_call_s(algorithm, tensor) for _ in range(2)]
        _, call_s = communicator.maximum(warm_up)
        affordable = int(_SECONDS_EACH / max(call_s, 1e-6))
        repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, affordable))
        seconds = sorted([_call_s(algorithm, tensor) for _ in range(repeats)])
        medians.append(seconds[repeats // 2])
    if isinstance(algorithm, TwoLevel):
        algorithm.drain()
    medians = communicator.maximum(medians)
    algorithm.close()
    return medians


def _call_s(algorithm: Algorithm, tensor: Tensor) -> float:
    """Seconds of one all-reduce, on a device with its work."""
    start = time.perf_counter()
    reduce_once(algorithm, tensor, _TIMING_SLOT)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def _table(sizes: list[int], times: dict[str, list[float]]) -> list[tuple[int, str]]:
    """For each timed size the fastest algorithm, limits halfway (geometrically) between sizes, runs merged."""
    limits = [int((size * larger) ** 0.5) for size, larger in itertools.pairwise(sizes)]
    limits.append(_LIMITLESS)
    table: list[tuple[int, str]] = []
    last_fastest = ""
    for index, limit in enumerate(limits):
        seconds = {name: by_size[index] for name, by_size in times.items()}
        fastest = min(seconds, key=seconds.__getitem__)  # the first of several, so `native` where all are equal
        if fastest == last_fastest:
            table.pop()
        table.append((limit, fastest))
        last_fastest = fastest
    return table


def _bucket_size(gradient_bytes: int, sizes: list[int], seconds: list[float], name: str) -> float:
    """MiB of DDP's buckets with which a step stands still for the shortest time, by what ``name`` was measured to take.

    The times' line gives the cost of a bucket and of a byte. Overlapped buckets hide behind backward but for the cost
    of each and all bytes of the last one: the least is at ``sqrt(gradient_bytes * cost of a bucket / cost of a byte)``.
    Of buckets that are not overlapped all bytes stand in the way.
    """
    if len(sizes) < 2:
        return DEFAULT_BUCKET_MB
    # The line through the smallest and the largest size, kept above 0 where timings are off.
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    byte_s = max(slope, 1e-13)
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
    costs = {megabytes: cost(megabytes) for megabytes in _BUCKET_CHOICES_MB}
    bound = _TIMING_ERROR * min(costs.values())
    close = [megabytes for megabytes, its_cost in costs.items() if its_cost <= bound]
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
    """A plan from its JSON; None if it is none, as in a file that another version or another program has written."""
    try:
        table = [(int(limit), str(name)) for limit, name in entry["table"]]
        fields = dict(entry)
        fields["table"] = table
        fields["source"] = "cached"
        plan = Plan(**fields)
    except (KeyError, TypeError, ValueError):
        return None
    if not table or any(name not in NAMES for _, name in table):
        return None
    return plan


def _write(cache: Path, key: str, plan: Plan) -> None:
    """Add ``plan`` to the file, replacing it whole; a cache that cannot be written costs time only."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        plans = _read(cache)
        plans[key] = asdict(plan)
        # In the same directory, so that it can be renamed: who reads meanwhile finds the old file or the new one.
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            file = Path(folder, "plans.json")
            file.write_text(json.dumps(plans))
            os.replace(file, cache)
    except OSError as error:
        warnings.warn(f"The plan could not be cached in {cache}: {error}", stacklevel=2)
