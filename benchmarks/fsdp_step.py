"""A training step with sharded parameters: torch's FSDP2 on gloo, and the same with this package's collectives.

A step is zero_grad, forward, backward, clipping by norm and AdamW. All arms train the same model on the same data in
the same processes, in rotation; their parameters are compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, relative_error, table, target
from ddp_step import _proportional_set_size
from models import WORKLOADS, Block
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

NO_SYNC = "unsharded, no communication"
SHARDINGS = {"full": True, "grad_op": False}  # whether parameters are freed after forward
STOCK = {sharding: f"FSDP2, {sharding}" for sharding in SHARDINGS}
OURS = {sharding: f"FSDP2 + ours, {sharding}" for sharding in SHARDINGS}
ARMS = [NO_SYNC, *STOCK.values(), *OURS.values()]
BLOCK = 3
MEMORY_STEPS = 4


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=["mlp", "gpt"])
    options.add_argument("--rounds", type=int, default=10, help=f"turns of each arm, of {BLOCK} steps each")
    args = options.parse_args()
    if args.quick:
        args.rounds = 3
    record = Record(
        "fsdp_step",
        "A step with sharded parameters, on one node",
        args,
        f"{NO_SYNC!r}: stock DDP in `no_sync()` with the same optimizer. It exchanges and copies nothing, but each "
        "rank steps all parameters, not its share alone.",
    )
    record.data["cases"] = {}
    for ranks in args.ranks:
        for model in args.models:
            _case(record, args, ranks, model)
    record.finish()


def _case(record: Record, args: Any, ranks: int, model: str) -> None:
    result = launch("fsdp_step:rank_main", ranks, {"model": model, "rounds": args.rounds})
    memory = {}
    for arm in [] if args.quick else ARMS:
        memory[arm] = launch("fsdp_step:memory_main", ranks, {"model": model, "arm": arm})
    name = f"{model}, {ranks} ranks"
    record.data["cases"][name] = {**result, "memory_mib": memory}
    stats = {arm: Stats.of(samples) for arm, samples in result["samples"].items()}
    none = stats[NO_SYNC]
    headings = ["arm", "best ms", "median ms", "cpu ms", "cpu ms over none", "MiB a rank"]
    rows = [[arm, s.best, s.median, s.cpu, s.cpu - none.cpu, memory.get(arm, "")] for arm, s in stats.items()]
    lines = []
    for sharding in SHARDINGS:
        ours, stock = stats[OURS[sharding]], stats[STOCK[sharding]]
        lines.append(target(f"{OURS[sharding]} / {STOCK[sharding]}, cpu", ours.cpu / stock.cpu, 0.65, False))
        lines.append(f"- the same, wall: {ours.median / stock.median:.2f}")
    record.section(
        name,
        WORKLOADS[model].__doc__ or "",
        table(headings, rows),
        f"{none.repeats} steps of each arm, all with AdamW and clipping. Parameters of the two arms of a sharding "
        f"differ by at most {max(result['errors'].values()):.0e} (relative, Euclidean norm). *MiB a rank* is the "
        "proportional set size at its largest within a step, after some steps, in a run of that arm alone, less what "
        "it was before the model was built.",
        "\n".join(lines),
    )


def rank_main(model: str, rounds: int) -> dict[str, Any]:
    """Samples of all arms, and how far parameters are from those of FSDP2 with its own collectives."""
    steps, modules, closers = {}, {}, []
    for arm in ARMS:
        steps[arm], modules[arm], close = _build(arm, model)
        closers.append(close)
    samples = interleave(steps, rounds, warmup=2, block=BLOCK)
    errors = {}
    for sharding in SHARDINGS:
        ours, stock = _parameters(modules[OURS[sharding]]), _parameters(modules[STOCK[sharding]])
        errors[sharding] = relative_error(ours, stock)
    assert max(errors.values()) < 1e-4, f"our collectives train differently: {errors}"
    for close in closers:
        close()
    return {"samples": samples, "errors": errors}


def memory_main(model: str, arm: str) -> int:
    """MiB of one rank that the arm needs, alone."""
    before = _proportional_set_size()
    seen: list[float] = []

    def measure() -> None:
        dist.barrier()
        seen.append(_proportional_set_size() - before)
        dist.barrier()

    step, _, close = _build(arm, model, measure)
    for _ in range(MEMORY_STEPS):
        step()
    close()
    return round(max(seen[len(seen) // 2 :]) / 2**20)


def _build(
    arm: str, model: str, measure: Callable[[], None] | None = None
) -> tuple[Callable[[], None], nn.Module, Callable[[], None]]:
    """The step of an arm, its module, and what ends it."""
    workload = WORKLOADS[model](dist.get_rank())
    module, close = workload.module, _nothing
    if arm == NO_SYNC:
        module = DistributedDataParallel(workload.module)
    else:
        close = _shard(module, arm.endswith("full"), arm in OURS.values())
    adamw = torch.optim.AdamW(workload.module.parameters(), lr=1e-3)

    def step() -> None:
        adamw.zero_grad()
        with module.no_sync() if arm == NO_SYNC else nullcontext():
            loss = workload.loss(module(workload.inputs), workload.target)
            if measure is not None:
                measure()
            loss.backward()
        if measure is not None:
            measure()
        nn.utils.clip_grad_norm_(workload.module.parameters(), 1.0)
        adamw.step()

    return step, workload.module, close


def _shard(module: nn.Module, reshard: bool, with_ours: bool) -> Callable[[], None]:
    """Shard ``module`` in place, each block or layer by itself; returns what ends it."""
    from lightning_smddp.communication.sharded_collectives import ShardedCollectives

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = [part for part in module.modules() if isinstance(part, Block)]
    if not units:
        units = [part for part in module if isinstance(part, nn.Linear)]
    for unit in [*units, module]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    if not with_ours:
        return _nothing
    collectives = ShardedCollectives(mesh, timedelta(minutes=5))
    collectives.attach(module)
    return collectives.close


def _nothing() -> None:
    pass


def _parameters(module: nn.Module) -> Tensor:
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in module.parameters()])


if __name__ == "__main__":
    main()
