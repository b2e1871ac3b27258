"""What ``lightning-smddp plan`` predicts of a rank's memory, against what ranks then hold, for five models.

Each strategy trains each model for a few steps in processes of its own. A rank's memory is what its process has that is
no file's, above what it had before the Trainer; of memory that ranks share, its part. It is looked at every 2 ms.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Record, launch, parser, table
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from plan_models import MODELS

import lightning_smddp
from lightning_smddp import plan

MIB = 2**20
STEPS = 2  # buckets are made anew, and pipelines checked, in the second
WITHIN = 0.15
STRATEGIES = [
    "smddp",
    "smddp, shard='optimizer'",
    "smddp_fsdp, full",
    "smddp_fsdp, grad_op",
    "smddp_pipeline, 1f1b",
    "smddp_pipeline, 1f1b, checkpointing",
]
_M_MMAP_THRESHOLD = -3  # of malloc.h


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--strategies", nargs="+", default=STRATEGIES, help="as `plan` names them")
    args = options.parse_args()
    if args.quick:
        args.models = ["MLP"]
    record = Record(
        "plan_accuracy",
        f"Predicted and measured memory, {args.ranks} ranks",
        args,
        "the prediction is the measurement.",
    )
    record.data["models"] = {}
    for model in args.models:
        _model(record, args, model)
    record.finish()


def _model(record: Record, args: argparse.Namespace, model: str) -> None:
    predicted = launch("plan_accuracy:predict", 1, {"model": model, "ranks": args.ranks})
    rows = []
    predicted = {name: found for name, found in predicted.items() if name in args.strategies}
    for name, (strategy, total, parts) in predicted.items():
        measured = launch("plan_accuracy:measure", args.ranks, {"model": model, "strategy": strategy})
        most = max(measured)
        rows.append([name, total / MIB, most / MIB, total / most, *(part / MIB for part in parts.values())])
        predicted[name].append(measured)
        print(model, name, f"{total / MIB:.0f} predicted, {most / MIB:.0f} measured", flush=True)
    record.data["models"][model] = predicted
    within = [name for name, (_, total, _, measured) in predicted.items() if abs(total / max(measured) - 1) <= WITHIN]
    record.section(
        model,
        MODELS[model].__doc__ or "",
        table(["strategy", "predicted", "measured", "ratio", *parts], rows),
        f"MiB of the rank with most. {len(within)} of {len(predicted)} within {WITHIN:.0%}.",
    )


def predict(model: str, ranks: int) -> dict[str, Any]:
    """For each strategy its expression, bytes, and bytes of the parts."""
    _quiet()
    torch.manual_seed(0)
    found = plan(MODELS[model](), ranks, 64.0)
    return {
        estimate.name: [estimate.strategy, estimate.memory.total, vars(estimate.memory)]
        for estimate in found.estimates
        if estimate.memory is not None
    }


def measure(model: str, strategy: str) -> list[int]:
    """Bytes that training adds on each rank at most."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**18)  # what is freed is given back
    _quiet()
    torch.manual_seed(0)
    chosen = eval(strategy, {name: getattr(lightning_smddp, name) for name in CLASSES})
    trainer = Trainer(
        strategy=chosen,
        devices=dist.get_world_size(),
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],
    )
    most = [0]
    before = _held()
    with _watched(most):
        trainer.fit(MODELS[model]())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, most[0] - before)
    return everyone


CLASSES = ("SMDDPStrategy", "PipelineStrategy", "SMDDPFSDPStrategy", "SMDDPDeepSpeedStrategy")


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _watched(most: list[int]) -> Iterator[None]:
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _held())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _held() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return sizes["RssAnon"] + sizes["RssShmem"] // dist.get_world_size()


if __name__ == "__main__":
    main()
