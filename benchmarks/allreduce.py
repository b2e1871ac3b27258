"""The mean of a gradient over the ranks of one node: gloo's all-reduce against each of our algorithms.

Sizes from 1 to 128 MiB of fp32 on 2 and 4 ranks. Each arm has a tensor of its own and is checked against a slow
reference before it is timed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, relative_error, table, target

MIB = 2**20
ROUNDS = {1: 200, 8: 100, 32: 40, 128: 12}
GLOO, ZERO_COPY, MEMCPY = "gloo", "shared_memory, zero-copy", "memcpy"


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--mib", type=int, nargs="+", default=list(ROUNDS), help="sizes of the tensor")
    options.add_argument("--rounds", type=float, default=1.0, help="factor of the number of repeats")
    options.add_argument("--block", type=int, default=5, help="repeats in each turn; 1: caches hold other arms' data")
    args = options.parse_args()
    if args.quick:
        args.mib, args.rounds = [1, 8], 0.1
    record = Record(
        "allreduce",
        "All-reduce (mean) of fp32 gradients inside one node",
        args,
        "a plain copy of as many bytes by one thread (`Tensor.copy_`), timed in the same rotation; the last column is "
        "bus bandwidth as a fraction of the copy's. An all-reduce reads and writes more than a copy does, but on "
        f"several cores. Each turn has {args.block} repeats.",
    )
    record.data["samples"] = {}
    targets = []
    for world_size in args.ranks:
        arguments = {"mib": args.mib, "rounds": args.rounds, "block": args.block}
        everything = launch("allreduce:rank_main", world_size, arguments)
        record.data["samples"][str(world_size)] = everything
        for size in args.mib:
            stats = {name: Stats.of(samples) for name, samples in everything[str(size)].items()}
            rows = [_row(name, size, world_size, stats) for name in stats if name != MEMCPY]
            copy = stats[MEMCPY]
            record.section(
                f"{world_size} ranks, {size} MiB",
                table(
                    [
                        "arm", "best ms", "median ms", "cpu ms", "bus GB/s",
                        "x gloo, best", "x gloo, median", "x gloo, cpu", "of memcpy",
                    ],
                    rows,
                ),
                f"{copy.repeats} repeats. memcpy: best {copy.best:.2f} ms, median {copy.median:.2f} ms, "
                f"{size * MIB / copy.median / 1e6:.1f} GB/s.",
            )  # fmt: skip
            if world_size == 2 and size in (8, 32):
                ours, gloo = stats[ZERO_COPY], stats[GLOO]
                label = f"{ZERO_COPY}, 2 ranks, {size} MiB"
                targets.append(target(f"{label}, bandwidth over gloo's", gloo.median / ours.median, 5, True, "x"))
                targets.append(target(f"{label}, gloo's CPU over ours", gloo.cpu / ours.cpu, 5, True, "x"))
    if targets:
        record.section("Targets", "\n".join(targets))
    record.finish()


def _row(name: str, mib: int, world_size: int, stats: dict[str, Stats]) -> list[Any]:
    ours, gloo, copy = stats[name], stats[GLOO], stats[MEMCPY]
    bus = 2 * (world_size - 1) / world_size * mib * MIB / ours.median / 1e6
    return [
        name, ours.best, ours.median, ours.cpu, bus,
        gloo.best / ours.best, gloo.median / ours.median, gloo.cpu / ours.cpu, bus / (mib * MIB / copy.median / 1e6),
    ]  # fmt: skip


def rank_main(mib: list[int], rounds: float, block: int) -> dict[int, Any]:
    """Samples by size and arm."""
    from lightning_smddp.communication.communicator import Communicator, reduce_once

    group = dist.group.WORLD
    assert group is not None
    world_size, rank = dist.get_world_size(), dist.get_rank()
    communicator = Communicator(group, torch.device("cpu"), timedelta(minutes=5))
    assert communicator.shared_memory_refusal is None, communicator.shared_memory_refusal
    by_backend = Communicator(group, torch.device("cpu"), timedelta(minutes=5))
    by_backend.shared_memory_refusal = "this arm uses the backend inside the node"
    algorithms = {
        "native": communicator.algorithm("native"),
        ZERO_COPY: communicator.algorithm("shared_memory"),
        "balanced": communicator.algorithm("balanced"),
        "hierarchical, gloo inside": by_backend.algorithm("hierarchical"),
    }
    results = {}
    for slot, size in enumerate(mib):
        numel = size * MIB // 4
        inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
        expected = torch.stack(inputs).mean(0)
        arms: dict[str, Any] = {}
        tensor = inputs[rank].clone()
        arms[GLOO] = lambda tensor=tensor: (dist.all_reduce(tensor), tensor.div_(world_size))
        tensors = {GLOO: tensor}
        for name, algorithm in algorithms.items():
            tensors[name] = tensor = inputs[rank].clone()
            arms[name] = lambda a=algorithm, t=tensor, s=slot: reduce_once(a, t, s)
        for name, arm in arms.items():
            arm()
            error = relative_error(tensors[name], expected)
            assert error < 1e-6, f"{name} differs from the reference by {error:.1e}"
        source, destination = inputs[rank], expected
        arms[MEMCPY] = lambda d=destination, s=source: d.copy_(s)
        results[size] = interleave(arms, max(3, int(ROUNDS.get(size, 20) * rounds / block)), block=block, solo=[MEMCPY])
    for algorithm in algorithms.values():
        algorithm.close()
    by_backend.close()
    communicator.close()
    return results


if __name__ == "__main__":
    main()
