"""A training step on the ranks of one node: stock DDP, well-set DDP, ``strategy="smddp"``, and no communication.

A step is forward, zero_grad, backward and optimizer, as Lightning's automatic optimization runs them. All arms train
the same model on the same data in the same processes, in rotation; their parameters are compared afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, relative_error, table, target
from models import WORKLOADS
from torch.nn.parallel import DistributedDataParallel

STOCK, TUNED, BATCHED = "stock DDP", "tuned DDP", "tuned DDP, batched copy"
OURS, STATIC, NO_SYNC = "smddp", "smddp, static_graph", "no communication"
ARMS = [STOCK, TUNED, BATCHED, OURS, STATIC, NO_SYNC]
BLOCK = 3
MEMORY_STEPS = 4


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options.add_argument("--rounds", type=int, default=15, help=f"turns of each arm, of {BLOCK} steps each")
    args = options.parse_args()
    if args.quick:
        args.rounds = 3
    record = Record(
        "ddp_step",
        f"A data-parallel training step, {args.ranks} ranks on one node",
        args,
        f"{NO_SYNC!r}: stock DDP in `no_sync()`, which computes the same and exchanges nothing. It is no strict bound: "
        "it allocates fresh gradients in each step, which arms that keep gradients in DDP's buckets need not.",
    )
    record.data["models"] = {}
    for model in args.models:
        result = launch("ddp_step:rank_main", args.ranks, {"model": model, "rounds": args.rounds})
        memory = {
            arm: launch("ddp_step:memory_main", args.ranks, {"model": model, "arm": arm})
            for arm in ([] if args.quick else ARMS)
        }
        record.data["models"][model] = {**result, "memory_mib": memory}
        stats = {arm: Stats.of(samples) for arm, samples in result["samples"].items()}
        headings = [
            "arm", "best ms", "median ms", "cpu ms", "x stock, best", "x stock, median", "x tuned, median",
            "x stock, cpu", "x tuned, cpu", "cpu ms over none",
        ]  # fmt: skip
        stock, tuned, none = stats[STOCK], stats[TUNED], stats[NO_SYNC]
        rows = [
            [
                arm, s.best, s.median, s.cpu, stock.best / s.best, stock.median / s.median, tuned.median / s.median,
                stock.cpu / s.cpu, tuned.cpu / s.cpu, s.cpu - none.cpu,
            ]
            for arm, s in stats.items()
        ]  # fmt: skip
        if memory:
            headings.append("MiB a rank")
            rows = [[*row, memory[row[0]]] for row in rows]
        ours = stats[OURS]
        record.section(
            model,
            WORKLOADS[model].__doc__ or "",
            f"Plan of {OURS}: {result['plan']}.",
            table(headings, rows),
            f"{ours.repeats} steps of each arm. *Cpu ms over none* is what the arm's communication costs. *MiB a rank* "
            "is the proportional set size after backward, in a run of that arm alone, less what it was before the "
            f"model was built. Parameters after all steps differ from those of {STOCK} by at most "
            f"{max(result['errors'].values()):.0e} (relative, Euclidean norm).",
            "\n".join(
                [
                    f"- {NO_SYNC} / {STOCK}: {none.median / stock.median:.2f} wall, {none.cpu / stock.cpu:.2f} cpu",
                    target(f"{OURS} / {STOCK}, wall", ours.median / stock.median, 0.65, False),
                    target(f"{OURS} / {TUNED}, wall", ours.median / tuned.median, 0.80, False),
                    target(f"{OURS} / {STOCK}, cpu", ours.cpu / stock.cpu, 0.65, False),
                    target(f"{OURS} / {TUNED}, cpu", ours.cpu / tuned.cpu, 0.80, False),
                ]
            ),
        )
    record.finish()


def rank_main(model: str, rounds: int) -> dict[str, Any]:
    """Samples of all arms, what was planned, and how far parameters are from stock DDP's."""
    steps, modules, closers, plan = {}, {}, [], ""
    for arm in ARMS:
        step, modules[arm], strategy = _build(arm, model)
        steps[arm] = step
        if strategy is not None:
            closers.append(strategy)
        if arm == OURS:
            rows = dict(strategy._scheme.describe())
            plan = f"{rows['algorithm']}; buckets of {rows['bucket size']}"
    samples = interleave(steps, rounds, warmup=2, block=BLOCK)
    flat = {arm: torch.cat([p.detach().flatten() for p in m.parameters()]) for arm, m in modules.items()}
    errors = {arm: relative_error(flat[arm], flat[STOCK]) for arm in ARMS if arm not in (STOCK, NO_SYNC)}
    assert max(errors.values()) < 1e-3, f"arms train differently from stock DDP: {errors}"
    for strategy in closers:
        strategy._session.close()
    return {"samples": samples, "plan": plan, "errors": errors}


def memory_main(model: str, arm: str) -> int:
    """MiB of one rank that the arm needs, alone."""
    before = _proportional_set_size()
    seen: list[float] = []

    def after_backward() -> None:
        dist.barrier()
        seen.append(_proportional_set_size() - before)
        dist.barrier()

    step, _, strategy = _build(arm, model, after_backward)
    for _ in range(MEMORY_STEPS):
        step()
    if strategy is not None:
        strategy._session.close()
    return round(max(seen) / 2**20)


def _build(
    arm: str, model: str, after_backward: Callable[[], None] | None = None
) -> tuple[Callable[[], None], torch.nn.Module, Any]:
    """The step of an arm, its module, and our strategy where it is one of ours."""
    workload = WORKLOADS[model](dist.get_rank())
    strategy = None
    if arm in (OURS, STATIC):
        strategy = _strategy(**({"static_graph": True} if arm == STATIC else {}))
        module = strategy.setup_module(workload.module)
    elif arm in (TUNED, BATCHED):
        module = DistributedDataParallel(workload.module, **_tuned(batched=arm == BATCHED))
    else:
        module = DistributedDataParallel(workload.module)

    def step() -> None:
        with module.no_sync() if arm == NO_SYNC else nullcontext():
            loss = workload.loss(module(workload.inputs), workload.target)
            workload.optimizer.zero_grad()
            loss.backward()
        if after_backward is not None:
            after_backward()
        workload.optimizer.step()

    return step, workload.module, strategy


def _strategy(**kwargs: Any) -> Any:
    """The strategy as a user gets it, but for what it prints and caches. Fabric's works without a Trainer."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    from lightning_smddp import CommunicationOptions, SMDDPFabricStrategy

    devices = [torch.device("cpu")] * dist.get_world_size()
    return SMDDPFabricStrategy(
        parallel_devices=devices,
        cluster_environment=LightningEnvironment(),
        communication=CommunicationOptions(verbose=False),
        **kwargs,
    )


def _tuned(batched: bool) -> dict[str, Any]:
    """DDP's own options for speed; ``batched_grad_copy``, new in torch 2.13, helps some models and hurts others."""
    tuned = {"gradient_as_bucket_view": True, "static_graph": True}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {**tuned, "batched_grad_copy": True} if batched and "batched_grad_copy" in known else tuned


def _proportional_set_size() -> float:
    """Bytes of memory of this process, shared pages counted in parts (`Pss`)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
