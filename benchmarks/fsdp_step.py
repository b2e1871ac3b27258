"""A training step with sharded parameters: torch's FSDP2 on gloo, and the same with this package's collectives.

A step is zero_grad, forward, backward, clipping by norm and AdamW. All arms train the same model on the same data in
the same processes, in rotation; their parameters are compared afterwards. Then the same through a ``Trainer``:
Lightning's ``ModelParallelStrategy`` against ``smddp_fsdp``, whose jobs take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, relative_error, table, target
from ddp_step import _proportional_set_size
from lightning.pytorch import LightningModule
from models import WORKLOADS, Block
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trainer_turns import Job, train_in_turns

NO_SYNC = "unsharded, no communication"
SHARDINGS = {"full": True, "grad_op": False}  # whether parameters are freed after forward
STOCK = {sharding: f"FSDP2, {sharding}" for sharding in SHARDINGS}
OURS = {sharding: f"FSDP2 + ours, {sharding}" for sharding in SHARDINGS}
ARMS = [NO_SYNC, *STOCK.values(), *OURS.values()]
LIGHTNING = {sharding: f"ModelParallelStrategy, {sharding}" for sharding in SHARDINGS}
SMDDP = {sharding: f"smddp_fsdp, {sharding}" for sharding in SHARDINGS}
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
            _trainer_case(record, args, ranks, model)
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


def _trainer_case(record: Record, args: Any, ranks: int, model: str) -> None:
    jobs = {}
    for sharding, reshard in SHARDINGS.items():
        jobs[LIGHTNING[sharding]] = Job(partial(SelfSharded, model, reshard), partial(_lightnings, ranks))
        jobs[SMDDP[sharding]] = Job(partial(Training, model), partial(_ours, sharding))
    samples, memory, losses = train_in_turns(jobs, ranks, args.rounds, block=BLOCK)
    first, *others = losses.values()
    error = max(relative_error(torch.tensor(other), torch.tensor(first)) for other in others)
    assert error < 1e-4, f"the strategies train differently: {losses}"
    name = f"{model}, {ranks} ranks, through a Trainer"
    record.data["cases"][name] = {"samples": samples, "memory_mib": memory, "error": error}
    stats = {arm: Stats.of(of_arm) for arm, of_arm in samples.items()}
    headings = ["arm", "best ms", "median ms", "cpu ms", "MiB a rank"]
    rows = [[arm, s.best, s.median, s.cpu, memory[arm]] for arm, s in stats.items()]
    lines = []
    for sharding in SHARDINGS:
        ours, lightnings = stats[SMDDP[sharding]], stats[LIGHTNING[sharding]]
        lines.append(target(f"{SMDDP[sharding]} / {LIGHTNING[sharding]}, cpu", ours.cpu / lightnings.cpu, 0.65, False))
        lines.append(f"- the same, wall: {ours.median / lightnings.median:.2f}")
    record.section(
        name,
        "`configure_model` calls `fully_shard` for Lightning's strategy; `smddp_fsdp` finds the units by itself. Each "
        "arm has its own processes, which wait while another arm trains.",
        table(headings, rows),
        f"{args.rounds} turns of each arm, of {BLOCK} steps each; a step includes Lightning's loop. Losses of the "
        f"first steps differ by at most {error:.0e} (relative). *MiB a rank* is the largest proportional set size at "
        "the end of a backward pass, less what it was before the model was built.",
        "\n".join(lines),
    )


class Training(LightningModule):
    """A workload as a LightningModule: the same batch in every step."""

    def __init__(self, model: str, rank: int) -> None:
        super().__init__()
        workload = WORKLOADS[model](rank)
        self.net, self.inputs, self.target, self.loss = workload.module, workload.inputs, workload.target, workload.loss

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The workload's loss."""
        return self.loss(self.net(self.inputs), self.target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SelfSharded(Training):
    """As Lightning's ``ModelParallelStrategy`` wants it."""

    def __init__(self, model: str, reshard: bool, rank: int) -> None:
        super().__init__(model, rank)
        self.reshard = reshard

    def configure_model(self) -> None:
        """Shard each unit."""
        _fully_shard(self.net, self.device_mesh["data_parallel"], self.reshard)


def _lightnings(ranks: int) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)


def _ours(sharding: Any) -> Any:
    from lightning_smddp import CommunicationOptions, SMDDPFSDPStrategy

    return SMDDPFSDPStrategy(sharding=sharding, communication=CommunicationOptions(verbose=False))


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
    _fully_shard(module, mesh, reshard)
    if not with_ours:
        return _nothing
    collectives = ShardedCollectives(mesh, timedelta(minutes=5))
    collectives.attach(module)
    return collectives.close


def _fully_shard(module: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
    units: list[nn.Module] = [part for part in module.modules() if isinstance(part, Block)]
    if not units:
        units = [part for part in module.children() if isinstance(part, nn.Linear)]
    for unit in [*units, module]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)


def _nothing() -> None:
    pass


def _parameters(module: nn.Module) -> Tensor:
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    whole = [cast(DTensor, parameter).full_tensor() for parameter in module.parameters()]
    return torch.cat([tensor.detach().flatten() for tensor in whole])


if __name__ == "__main__":
    main()
