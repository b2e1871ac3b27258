"""A training step of DeepSpeed's ZeRO on CPU ranks: on gloo, and the same with this package's collectives.

A step is forward, backward, clipping by norm and AdamW. All arms train the same model on the same data in the same
processes, in rotation; their parameters are compared afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, relative_error, table
from models import WORKLOADS
from torch import Tensor

STAGES = (1, 2, 3)
STOCK = {stage: f"DeepSpeed, stage {stage}" for stage in STAGES}
OURS = {stage: f"DeepSpeed + ours, stage {stage}" for stage in STAGES}
BLOCK = 3
LIMIT = timedelta(minutes=5)


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2])
    options.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=["mlp", "gpt"])
    options.add_argument("--rounds", type=int, default=10, help=f"turns of each arm, of {BLOCK} steps each")
    args = options.parse_args()
    if args.quick:
        args.rounds = 3
    record = Record(
        "deepspeed_step",
        "A step of DeepSpeed's ZeRO, on one node",
        args,
        "DeepSpeed 0.19.8 with its collectives on gloo.",
    )
    record.data["cases"] = {}
    for ranks in args.ranks:
        for model in args.models:
            _case(record, args, ranks, model)
    record.finish()


def _case(record: Record, args: Any, ranks: int, model: str) -> None:
    result = launch("deepspeed_step:rank_main", ranks, {"model": model, "rounds": args.rounds})
    name = f"{model}, {ranks} ranks"
    record.data["cases"][name] = result
    stats = {arm: Stats.of(samples) for arm, samples in result["samples"].items()}
    rows = [[arm, s.best, s.median, s.cpu] for arm, s in stats.items()]
    lines = []
    for stage in STAGES:
        ours, stock = stats[OURS[stage]], stats[STOCK[stage]]
        cpu, wall = ours.cpu / stock.cpu, ours.median / stock.median
        lines.append(f"- stage {stage}, ours / DeepSpeed's: cpu {cpu:.2f}, wall {wall:.2f}")
    record.section(
        name,
        WORKLOADS[model].__doc__ or "",
        table(["arm", "best ms", "median ms", "cpu ms"], rows),
        f"{stats[STOCK[1]].repeats} steps of each arm, with AdamW and clipping. Parameters of the two arms of a stage "
        f"differ by at most {max(result['errors'].values()):.0e} (relative, Euclidean norm).",
        "\n".join(lines),
    )


def rank_main(model: str, rounds: int) -> dict[str, Any]:
    """Samples of all arms, and how far parameters are from those of DeepSpeed with its own collectives."""
    from deepspeed import comm

    from lightning_smddp.communication.communicator import Communicator
    from lightning_smddp.deepspeed.collectives import NodeCollectives
    from lightning_smddp.deepspeed.start import use_device

    use_device(torch.device("cpu", 0))
    comm.init_distributed("gloo")
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"), LIMIT)
    ours, stock = NodeCollectives(communicator, LIMIT), comm.comm.cdb
    steps, engines = {}, {}
    for stage in STAGES:
        for arm, backend in ((STOCK[stage], stock), (OURS[stage], ours)):
            steps[arm], engines[arm] = _build(model, stage, backend)
    samples = interleave(steps, rounds, warmup=2, block=BLOCK)
    comm.comm.cdb = stock
    errors = {}
    for stage in STAGES:
        errors[str(stage)] = relative_error(_parameters(engines[OURS[stage]]), _parameters(engines[STOCK[stage]]))
    assert max(errors.values()) < 1e-4, f"our collectives train differently: {errors}"
    ours.close()
    communicator.close()
    return {"samples": samples, "errors": errors}


def _build(model: str, stage: int, backend: Any) -> tuple[Callable[[], None], Any]:
    """The step of an arm, and its engine."""
    import deepspeed

    workload = WORKLOADS[model](dist.get_rank())
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0),
        model=workload.module,
        optimizer=torch.optim.AdamW(workload.module.parameters(), lr=1e-3, fused=True),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": len(workload.inputs),
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            # As Lightning's and this package's strategies set them.
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": 200_000_000,
                "allgather_bucket_size": 200_000_000,
            },
        },
    )

    def step() -> None:
        deepspeed.comm.comm.cdb = backend
        loss = workload.loss(engine(workload.inputs), workload.target)
        engine.backward(loss)
        engine.step()

    return step, engine


def _parameters(engine: Any) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    return torch.cat([safe_get_full_fp32_param(parameter).flatten() for parameter in engine.module.parameters()])


if __name__ == "__main__":
    main()
