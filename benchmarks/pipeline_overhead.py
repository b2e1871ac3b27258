"""What a pipelined step costs beside the model's own work: a model that does next to nothing, on two ranks.

With PYTHONPATH at another version of the package the same script measures that one.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, table
from pipeline_arms import Fit, HandWritten
from pipeline_models import tiny
from torch.distributed.pipelining import Schedule1F1B

from lightning_smddp import CommunicationOptions, PipelineStrategy
from lightning_smddp.pipeline.runtime.stage import Stage

RANKS = 2
OURS, HAND = "smddp_pipeline", "hand-written 1F1B"


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--rounds", type=int, default=200, help="turns of each arm, of 1 step each")
    args = options.parse_args()
    if args.quick:
        args.rounds = 3
    record = Record(
        "pipeline_overhead",
        f"A pipelined step of a tiny model, {RANKS} ranks on one node, {args.microbatches} micro-batches",
        args,
        f"{HAND!r} has no Trainer around its steps, no NaN check, and shows its loss on the last rank alone.",
    )
    arguments = {"count": args.microbatches, "rounds": args.rounds}
    result = launch("pipeline_overhead:rank_main", RANKS, arguments)
    record.data |= result
    stats = {arm: Stats.of(samples) for arm, samples in result["samples"].items()}
    hand = stats[HAND]
    rows = [[arm, s.best, s.median, s.cpu, s.median / hand.median, s.cpu / hand.cpu] for arm, s in stats.items()]
    calls = [
        f"stage {stage} {statistics.median(times):.0f} us (best {min(times):.0f} us)"
        for stage, times in result["call_us"].items()
    ]
    record.section(
        "tiny",
        tiny.__doc__ or "",
        table(["arm", "best ms", "median ms", "cpu ms", "/ hand, median", "/ hand, cpu"], rows),
        f"{hand.repeats} steps of each arm.",
        f"A stage's forward of a micro-batch, without the layers' own: {', '.join(calls)}.",
    )
    record.finish()


def rank_main(count: int, rounds: int) -> dict[str, Any]:
    """Samples of both arms, and microseconds of a stage's forward beside the layers'."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    workload = tiny(8 * count)
    cut = len(workload.names) // 2
    strategy = PipelineStrategy(
        num_microbatches=count, split=[workload.names[cut]], communication=CommunicationOptions(verbose=False)
    )
    ours = Fit(workload, strategy, RANKS)
    arms: dict[str, Any] = {OURS: ours, HAND: HandWritten(workload, cut, Schedule1F1B, count)}
    samples = interleave(arms, rounds, warmup=5)
    found = _time_calls(ours, workload.names)
    for _ in range(rounds):
        ours()
    ours.close()
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, found)
    return {"samples": samples, "call_us": {stage: times for theirs in everyone for stage, times in theirs.items()}}


def _time_calls(arm: Fit, layers: list[str]) -> dict[int, list[float]]:
    """Microseconds of each forward of a stage from now on that are not spent in ``layers``."""
    found: dict[int, list[float]] = {}
    inside = [0.0]
    forward = Stage.forward_one_chunk

    def timed(self: Stage, *args: Any, **kwargs: Any) -> Any:
        begin, inside[0] = time.perf_counter(), 0.0
        sent = forward(self, *args, **kwargs)
        found.setdefault(self.stage_index, []).append(1e6 * (time.perf_counter() - begin - inside[0]))
        return sent

    def timed_layer(layer: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        result = layer(*args)
        inside[0] += time.perf_counter() - begin
        return result

    Stage.forward_one_chunk = timed  # type: ignore[method-assign]
    for name in layers:
        layer = arm.module.get_submodule(name)
        layer.forward = partial(timed_layer, layer.forward)
    return found


if __name__ == "__main__":
    main()
