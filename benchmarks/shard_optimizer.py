"""A training step with ``shard="optimizer"``: against ``smddp`` with the same optimizer, and DDP without communication.

A step is zero_grad, forward, backward, clipping by norm and AdamW. All arms train the same model on the same data in
the same processes, in rotation; their parameters are compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, relative_error, table, target
from ddp_step import _proportional_set_size, _strategy
from models import WORKLOADS
from torch.nn.parallel import DistributedDataParallel

NO_SYNC, OURS, SHARDED = "no communication", "smddp", "smddp, shard='optimizer'"
ARMS = [NO_SYNC, OURS, SHARDED]
OPTIMIZERS = {"AdamW": False, "AdamW(fused=True)": True}
BLOCK = 3
MEMORY_STEPS = 4


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--models", nargs="+", choices=["mlp", "gpt"], default=["mlp", "gpt"])
    options.add_argument("--rounds", type=int, default=10, help=f"turns of each arm, of {BLOCK} steps each")
    args = options.parse_args()
    if args.quick:
        args.rounds = 3
    record = Record(
        "shard_optimizer",
        "A step with a sharded optimizer, on one node",
        args,
        f"{NO_SYNC!r}: stock DDP in `no_sync()` with the same optimizer, which exchanges nothing.",
    )
    record.data["cases"] = {}
    for ranks in args.ranks:
        for model in args.models:
            for optimizer in OPTIMIZERS:
                _case(record, args, ranks, model, optimizer)
                record.finish()  # so that a run that is cut short leaves what it has measured


def _case(record: Record, args: Any, ranks: int, model: str, optimizer: str) -> None:
    words = {"model": model, "optimizer": optimizer}
    result = launch("shard_optimizer:rank_main", ranks, {**words, "rounds": args.rounds})
    memory = {}
    for arm in [] if args.quick else ARMS:
        memory[arm] = launch("shard_optimizer:memory_main", ranks, {**words, "arm": arm})
    name = f"{model}, {optimizer}, {ranks} ranks"
    record.data["cases"][name] = {**result, "memory_mib": memory}
    stats = {arm: Stats.of(samples) for arm, samples in result["samples"].items()}
    ours, sharded, none = stats[OURS], stats[SHARDED], stats[NO_SYNC]
    headings = ["arm", "median ms", "cpu ms", "x smddp, median", "x smddp, cpu", "state, elements a rank", "MiB a rank"]
    rows = [
        [arm, s.median, s.cpu, s.median / ours.median, s.cpu / ours.cpu, result["elements"][arm], memory.get(arm, "")]
        for arm, s in stats.items()
    ]
    record.section(
        name,
        WORKLOADS[model].__doc__ or "",
        table(headings, rows),
        f"{ours.repeats} steps of each arm. Parameters of the two arms of `smddp` differ by at most "
        f"{result['error']:.0e} (relative, Euclidean norm). *MiB a rank* is the proportional set size after steps, in "
        "a run of that arm alone, less what it was before the model was built.",
        "\n".join(
            [
                target(f"{SHARDED} / {OURS}, cpu", sharded.cpu / ours.cpu, 0.90, False),
                target(f"{SHARDED} / {NO_SYNC}, cpu", sharded.cpu / none.cpu, 1.0, False),
            ]
        ),
    )


def rank_main(model: str, optimizer: str, rounds: int) -> dict[str, Any]:
    """Samples of all arms, elements of state, and how far parameters of the sharded arm are from the other's."""
    steps, modules, elements, closers = {}, {}, {}, []
    for arm in ARMS:
        steps[arm], modules[arm], optimizers, close = _build(arm, model, optimizer)
        closers.append(close)
        steps[arm]()
        values = [value for state in optimizers.state.values() for value in state.values()]
        elements[arm] = sum(value.numel() for value in values)
    samples = interleave(steps, rounds, warmup=2, block=BLOCK)
    flat = {arm: torch.cat([p.detach().flatten() for p in m.parameters()]) for arm, m in modules.items()}
    error = relative_error(flat[SHARDED], flat[OURS])
    assert error < 1e-4, f"the sharded arm trains differently: {error}"
    for close in closers:
        close()
    return {"samples": samples, "elements": elements, "error": error}


def memory_main(model: str, optimizer: str, arm: str) -> int:
    """MiB of one rank that the arm needs, alone."""
    before = _proportional_set_size()
    step, _, _, close = _build(arm, model, optimizer)
    for _ in range(MEMORY_STEPS):
        step()
    dist.barrier()
    used = _proportional_set_size() - before
    dist.barrier()
    close()
    return round(used / 2**20)


def _build(
    arm: str, model: str, optimizer: str
) -> tuple[Callable[[], None], torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """The step of an arm, its module, its optimizer, and what ends it."""
    workload = WORKLOADS[model](dist.get_rank())
    adamw = torch.optim.AdamW(workload.module.parameters(), lr=1e-3, fused=OPTIMIZERS[optimizer])
    closers: list[Callable[[], None]] = []
    if arm == NO_SYNC:
        module = DistributedDataParallel(workload.module)
    else:
        strategy = _strategy(shard=None if arm == OURS else "optimizer")
        module = strategy.setup_module(workload.module)
        strategy.setup_optimizer(adamw)
        closers += [*(sharded.close for sharded in strategy._sharded), strategy._session.close]

    def clip() -> None:
        if arm == NO_SYNC:
            torch.nn.utils.clip_grad_norm_(workload.module.parameters(), 1.0)
        else:
            strategy.clip_gradients_norm(workload.module, adamw, 1.0)

    def step() -> None:
        adamw.zero_grad()
        with module.no_sync() if arm == NO_SYNC else nullcontext():
            workload.loss(module(workload.inputs), workload.target).backward()
        clip()
        adamw.step()

    def close() -> None:
        for end in closers:
            end()

    return step, workload.module, adamw, close


if __name__ == "__main__":
    main()
