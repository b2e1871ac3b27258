"""A pipelined training step: ``strategy="smddp_pipeline"``, hand-written torch stages, DeepSpeed, and one process.

Ours runs in ``Trainer.fit``, with all that Lightning does around a step; the others are bare loops. All arms train the
same layers on the same batch in the same processes, in rotation; their parameters are compared afterwards.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, relative_error, table, target
from pipeline_arms import DeepSpeed, Fit, HandWritten, OneProcess
from pipeline_models import WORKLOADS
from torch import cat, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from lightning_smddp import CommunicationOptions, PipelineStrategy

RANKS = 2
OURS, AUTO = "smddp_pipeline", "smddp_pipeline, own cut"
HAND, GPIPE, DEEPSPEED = "hand-written 1F1B", "hand-written GPipe", "DeepSpeed 1F1B"
ONE, BUSY, WHOLE = "one process", "one process, other core busy", "one process, whole batch"
NO_DEEPSPEED = (
    "DeepSpeed is not installed, so its arm is left out. `pip install lightning-smddp[deepspeed]` adds it; at its "
    "first start it compiles an operator, which takes a compiler, ninja and some minutes."
)


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--rows", type=int, nargs=2, default=[16, 1024], help="of a batch of the GPT, of the MLP")
    options.add_argument("--rounds", type=int, default=16, help="turns of each arm, of 1 step each")
    args = options.parse_args()
    if args.quick:
        args.rounds, args.rows, args.models = 1, [8, 64], args.models[:1]
    record = Record(
        "pipeline_step",
        f"A pipelined training step, {RANKS} ranks on one node, {args.microbatches} micro-batches",
        args,
        "the bubble bound. With M micro-batches on p ranks, at most M / (M + p - 1) of all ranks' time is work. "
        f"{ONE!r} runs the same micro-batches on one core while the other core idles; in {BUSY!r} both cores run one, "
        "which shows what ranks lose by sharing a machine.",
    )
    record.data["models"] = {}
    for model in args.models:
        report(record, args, model)
    record.finish()


def report(record: Record, args: argparse.Namespace, model: str) -> None:
    """Run one model and add its section."""
    rows, count = dict(zip(WORKLOADS, args.rows, strict=True))[model], args.microbatches
    arguments = {"model": model, "rows": rows, "count": count, "rounds": args.rounds}
    result = launch("pipeline_step:rank_main", RANKS, arguments, env=_environment())
    record.data["models"][model] = result
    stats = {arm: Stats.of(samples) for arm, samples in result["samples"].items()}
    ours, hand, one = stats[OURS], stats[HAND], stats[ONE]
    bound = count / (count + RANKS - 1)
    ratios = [
        [
            arm, s.best, s.median, s.cpu, s.median / hand.median, s.best / hand.best, s.cpu / hand.cpu,
            one.median / (RANKS * s.median) / bound, stats[BUSY].median / (RANKS * s.median) / bound,
        ]
        for arm, s in stats.items()
    ]  # fmt: skip
    headings = ["arm", "best ms", "median ms", "cpu ms", "/ hand, median", "/ hand, best", "/ hand, cpu"]
    targets = [
        target(f"{OURS} / {HAND}, median", ours.median / hand.median, 1.03, False),
        target(f"{OURS} / {HAND}, cpu", ours.cpu / hand.cpu, 1.03, False),
        target("efficiency, of the bubble bound", ratios[0][-2], 0.95, True),
        target("efficiency, of the bubble bound with both cores busy", ratios[0][-1], 0.95, True),
        NO_DEEPSPEED
        if DEEPSPEED not in stats
        else target(f"{OURS} / {DEEPSPEED}, median", ours.median / stats[DEEPSPEED].median, 0.90, False),
        target("trace, reference run and cut, in steps", result["divide_ms"] / ours.median, 3.0, False),
    ]
    record.section(
        model,
        f"{WORKLOADS[model].__doc__} Batch {rows} in {count} micro-batches.",
        table([*headings, "of bound", "of bound, busy"], ratios),
        f"{ours.repeats} steps of each arm. *of bound* is {ONE!r} / ({RANKS} x arm) / (M / (M + p - 1)); *busy* is the "
        f"same with {BUSY!r}. {AUTO!r} chose its cut itself ({result['cut']}), the others begin stage 1 with "
        f"`{result['split']}`. Parameters after all steps differ from those of {ONE!r} by at most "
        f"{max(result['errors'].values()):.0e} (relative, Euclidean norm).",
        f"Start: {result['divide_ms']:.0f} ms for the trace, the reference run and the cut; the first step took "
        f"{result['first_ms']:.0f} ms with the check.",
        "\n".join(targets),
    )


def rank_main(model: str, rows: int, count: int, rounds: int) -> dict[str, Any]:
    """Samples of all arms, and how far parameters are from one process's."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    workload = WORKLOADS[model](rows)
    cut = len(workload.names) // 2
    ours = Fit(workload, _strategy(count, [workload.names[cut]]), RANKS)
    with _timed("lightning_smddp.bridge.partitioning:make_plan") as divide:
        first = _milliseconds(ours)
    auto = Fit(workload, _strategy(count, None), RANKS)
    arms: dict[str, Any] = {
        OURS: ours,
        AUTO: auto,
        HAND: HandWritten(workload, cut, Schedule1F1B, count),
        GPIPE: HandWritten(workload, cut, ScheduleGPipe, count),
        **({DEEPSPEED: DeepSpeed(workload, count)} if find_spec("deepspeed") else {}),
        ONE: OneProcess(workload, count),
        BUSY: OneProcess(workload, count),
        WHOLE: OneProcess(workload, 1),
    }
    for name, arm in arms.items():
        if name != OURS:
            arm()
    samples = interleave(arms, rounds, warmup=1, solo=(ONE, WHOLE))
    begins = auto.stages_begin()
    ours.close()
    auto.close()
    errors = {name: _error(arm.module, arms[ONE].module) for name, arm in arms.items() if name != ONE}
    if dist.get_rank() == 0:
        assert max(errors.values()) < 1e-3, f"arms train differently from one process: {errors}"
    return {
        "samples": samples,
        "first_ms": first,
        "divide_ms": divide[0],
        "cut": "stage 1 begins with `" + "`, `".join(begins) + "`",
        "split": workload.names[cut],
        "errors": errors,
    }


def _strategy(count: int, split: list[str] | None) -> Any:
    communication = CommunicationOptions(verbose=False)
    return PipelineStrategy(num_microbatches=count, split=split, communication=communication)


def _milliseconds(arm: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    arm()
    return 1e3 * (time.perf_counter() - begin)


@contextmanager
def _timed(function: str) -> Iterator[list[float]]:
    """Milliseconds of each call of ``module:function`` in this context."""
    module, name = function.split(":")
    original, times = getattr(sys.modules[module], name), []

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        times.append(1e3 * (time.perf_counter() - begin))
        return result

    setattr(sys.modules[module], name, timed)
    try:
        yield times
    finally:
        setattr(sys.modules[module], name, original)


def _error(module: nn.Module, expected: nn.Module) -> float:
    """Of the parameters that ``module`` has: all, or on rank 0 those of the first layers."""
    flat = [cat([p.detach().flatten() for p in m.parameters()]) for m in (module, expected)]
    return relative_error(flat[0], flat[1][: len(flat[0])])


def _environment() -> dict[str, str]:
    """What DeepSpeed needs: it looks for the ranks, and for ninja in PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {"DS_ACCELERATOR": "cpu", "PATH": path, "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS)}


if __name__ == "__main__":
    main()
