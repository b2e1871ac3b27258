"""A training step with ``shard="optimizer"``: against ``smddp`` with the same optimizer, and DDP without communication.

A step is zero_grad, forward, backward, clipping by norm and AdamW. All arms train the same model on the same data in
the same processes, in rotation; their parameters are compared afterwards. Within the same steps the optimizer's own
processor time is taken: what it is of a step of ``smddp`` says how much sharding could save at best.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
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
    options.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
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
            for optimizer in args.optimizers:
                _case(record, args, ranks, model, optimizer)
                record.finish()  # so that a run that is cut short leaves what it has measured


def _case(record: Record, args: Any, ranks: int, model: str, optimizer: str) -> None:
    words = {"model": model, "optimizer": optimizer}
    result = launch("shard_optimizer:rank_main", ranks, {**words, "rounds": args.rounds})
    memory: dict[str, dict[str, int]] = {}
    for arm in [] if args.quick else ARMS:
        memory[arm] = launch("shard_optimizer:memory_main", ranks, {**words, "arm": arm})
    name = f"{model}, {optimizer}, {ranks} ranks"
    record.data["cases"][name] = {**result, "memory_mib": memory}
    stats = {arm: Stats.of(samples) for arm, samples in result["samples"].items()}
    ours, sharded, none = stats[OURS], stats[SHARDED], stats[NO_SYNC]
    optimizing = {arm: statistics.median(samples) for arm, samples in result["optimizing_ms"].items()}
    headings = ["arm", "median ms", "cpu ms", "x smddp, median", "x smddp, cpu", "optimizer's cpu ms"]
    headings += ["state, elements a rank", "MiB a rank", "MiB of the node at most"]
    rows = []
    for arm, s in stats.items():
        held = memory.get(arm, {"rank": "", "node": ""})
        times = [s.median, s.cpu, s.median / ours.median, s.cpu / ours.cpu, optimizing[arm]]
        rows.append([arm, *times, result["elements"][arm], held["rank"], held["node"]])
    share = optimizing[OURS] / ours.cpu
    best = 1 - share * (1 - 1 / ranks)
    record.section(
        name,
        WORKLOADS[model].__doc__ or "",
        table(headings, rows),
        f"{ours.repeats} steps of each arm. Parameters of the two arms of `smddp` differ by at most "
        f"{result['error']:.0e} (relative, Euclidean norm). *Optimizer's cpu* is the processor time of `step()` alone, "
        "of all ranks, in the same steps. *MiB a rank* is the proportional set size after steps, in a run of that arm "
        "alone, less what it was before the model was built; *of the node* the sum over its ranks, in which what they "
        "share is counted once, looked at every 3 ms from the model's building on.",
        f"The optimizer takes {share:.2f} of a step of {OURS}, so {best:.2f} is what sharding could reach at best: if "
        f"its step took 1 / {ranks} of that. It takes {optimizing[SHARDED] / optimizing[OURS]:.2f}.",
        "\n".join(
            [
                target(f"{SHARDED} / {OURS}, cpu", sharded.cpu / ours.cpu, 0.90, False),
                target(f"{SHARDED} / {NO_SYNC}, cpu", sharded.cpu / none.cpu, 1.0, False),
            ]
        ),
    )


def rank_main(model: str, optimizer: str, rounds: int) -> dict[str, Any]:
    """Samples of all arms, elements of state, and how far parameters of the sharded arm are from the other's."""
    arms = {arm: Arm(arm, model, optimizer) for arm in ARMS}
    elements = {}
    for name, arm in arms.items():
        arm.step()
        values = [value for state in arm.optimizer.state.values() for value in state.values()]
        elements[name] = sum(value.numel() for value in values)
    samples = interleave({name: arm.step for name, arm in arms.items()}, rounds, warmup=2, block=BLOCK)
    flat = {name: torch.cat([p.detach().flatten() for p in arm.module.parameters()]) for name, arm in arms.items()}
    error = relative_error(flat[SHARDED], flat[OURS])
    assert error < 1e-4, f"the sharded arm trains differently: {error}"
    everyone: list[dict[str, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: arm.optimizing_ms[-rounds * BLOCK :] for name, arm in arms.items()})
    optimizing = {name: [sum(ranks) for ranks in zip(*(own[name] for own in everyone), strict=True)] for name in arms}
    for arm in arms.values():
        arm.close()
    return {"samples": samples, "elements": elements, "error": error, "optimizing_ms": optimizing}


def memory_main(model: str, optimizer: str, arm: str) -> dict[str, int]:
    """MiB that the arm needs, alone: of one rank after steps, and of all ranks together at most."""
    dist.barrier()
    before = _proportional_set_size()
    with _watched_node() as most:
        built = Arm(arm, model, optimizer)
        for _ in range(MEMORY_STEPS):
            built.step()
        dist.barrier()
        used = _proportional_set_size() - before
        dist.barrier()
    built.close()
    return {"rank": round(used / 2**20), "node": round((max(most) - most[0]) / 2**20)}


@contextmanager
def _watched_node() -> Iterator[list[int]]:
    """On rank 0: bytes of all ranks together, which are on one node; the first before anyone goes on."""
    processes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    sizes, done = [_node_bytes(processes)], threading.Event()
    dist.barrier()

    def look() -> None:
        while not done.wait(0.003):
            sizes.append(_node_bytes(processes))

    watcher = threading.Thread(target=look)
    if dist.get_rank() == 0:
        watcher.start()
    try:
        yield sizes
    finally:
        done.set()
        if dist.get_rank() == 0:
            watcher.join()


def _node_bytes(processes: Sequence[int]) -> int:
    total = 0
    for process in processes:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


class Arm:
    """One arm: a module with what trains it.

    Attributes:
        module, optimizer: of the workload.
        optimizing_ms: processor time of this rank in each step of the optimizer.
    """

    def __init__(self, name: str, model: str, optimizer: str) -> None:
        self._workload, self._strategy = WORKLOADS[model](dist.get_rank()), None
        self.module = self._workload.module
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=OPTIMIZERS[optimizer])
        self.optimizing_ms: list[float] = []
        if name == NO_SYNC:
            self._replica: Any = DistributedDataParallel(self.module)
            return
        self._strategy = _strategy(shard=None if name == OURS else "optimizer")
        self._replica = self._strategy.setup_module(self.module)
        self._strategy.setup_optimizer(self.optimizer)

    def step(self) -> None:
        """One training step."""
        work = self._workload
        self.optimizer.zero_grad()
        with self._replica.no_sync() if self._strategy is None else nullcontext():
            work.loss(self._replica(work.inputs), work.target).backward()
        if self._strategy is None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        else:
            self._strategy.clip_gradients_norm(self.module, self.optimizer, 1.0)
        begin = time.process_time()
        self.optimizer.step()
        self.optimizing_ms.append(1e3 * (time.process_time() - begin))

    def close(self) -> None:
        """End what the strategy has begun."""
        if self._strategy is not None:
            self._strategy._session.close()


if __name__ == "__main__":
    main()
