# python examples/demo_pipeline.py
"""One GPT, two ways: a single device, and ``smddp_pipeline`` on two ranks that hold half of it each.

Both see the same batches from the same initial weights, so the losses have to coincide. A callback draws one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from demo_turns import OUTPUT, Arm, print_table, quiet, run_in_turns, take_turn

ARMS = {"single": "one device", "pipeline": "smddp_pipeline"}
HEADER = ["", "ranks", "parameters by rank", "train loss", "step, ms", "loss"]
TURN_STEPS = 3
MICROBATCHES = 8
DRAWN_STEP = {False: 7, True: 2}  # True: quick


def train(arm: str, out: Path, turns: list[int], quick: bool) -> None:
    """Train, and write losses and times to ``out``.json."""
    quiet()
    import lightning as L
    import torch
    from models import GPT, standard_library
    from torch.utils.data import DataLoader

    from lightning_smddp import PipelineStrategy, PipelineTimeline

    class Stopwatch(L.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.step_ms: list[float] = []

        def setup(self, trainer, module, stage) -> None:
            take_turn(trainer, turns)

        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            if batch_idx % TURN_STEPS == 0:
                take_turn(trainer, turns)
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            self.step_ms.append(1e3 * (time.perf_counter() - self.started))
            self.losses.append(float(outputs["loss"]))

        def on_train_end(self, trainer, module) -> None:
            held = sum(p.numel() for p in module.parameters() if type(p) is torch.nn.Parameter)  # others have no memory
            self.parameters = [held] * trainer.num_devices
            if trainer.num_devices > 1:
                torch.distributed.all_gather_object(self.parameters, held)
            take_turn(trainer, turns)

    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    steps = 4 if quick else 42
    size = {"width": 64, "depth": 2, "heads": 2} if quick else {}
    ranks = 1 if arm == "single" else 2
    pictures = [OUTPUT / "pipeline_timeline.svg", OUTPUT / "pipeline_timeline.json"]
    timeline = PipelineTimeline(pictures, batch_idx=DRAWN_STEP[quick])
    stopwatch = Stopwatch()
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, max_steps=steps,
        strategy="auto" if arm == "single" else PipelineStrategy(num_microbatches=MICROBATCHES),
        callbacks=[stopwatch] if arm == "single" else [timeline, stopwatch],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(GPT(**size), DataLoader(standard_library(samples=16 * steps), batch_size=16))
    if trainer.is_global_zero:
        times = stopwatch.step_ms[1:]  # without the first, in which the pipeline is made
        result = {"ranks": ranks, "losses": stopwatch.losses, "parameters": stopwatch.parameters}
        result |= {"step_ms": statistics.median(times), "best_ms": min(times)}
        out.with_suffix(".json").write_text(json.dumps(result))


def row(arm: str, results: dict[str, dict]) -> list[str]:
    """An arm's line of the table."""
    result, single = results[arm], results["single"]
    ours, theirs = np.array(result["losses"]), np.array(single["losses"])
    cells = [ARMS[arm], str(result["ranks"]), ", ".join(f"{count / 1e6:.2f} M" for count in result["parameters"])]
    cells += [f"{ours[0]:.2f} > {ours[-1]:.3f}", f"{result['step_ms']:.3g} ({result['best_ms']:.3g})"]
    return [*cells, "" if arm == "single" else f"{np.max(np.abs(ours - theirs) / np.abs(theirs)):.1e}"]


def run(quick: bool) -> None:
    """Both arms, in turns, and what came out."""
    print(f"training the GPT: {', '.join(ARMS.values())}, in turns ...", flush=True)
    options = ["--quick"] * quick
    results = run_in_turns({arm: Arm(__file__, ["--arm", arm, *options], f"pipeline-{arm}") for arm in ARMS})
    print(f'\nWhat strategy="smddp_pipeline" says at the start of fit:\n\n{results["pipeline"]["table"]}\n')
    print_table("same seed, same batches", HEADER, {"": [row(arm, results) for arm in results]})
    print(
        "1 thread each. step: median (best) time on rank 0, without the first. At best the\npipeline takes "
        f"{(MICROBATCHES + 1) / (2 * MICROBATCHES):.2f} of the single device's time ({MICROBATCHES} micro-batches)."
        "\nloss: largest relative difference from one device's."
    )
    print(f"what each rank did when: {OUTPUT / 'pipeline_timeline.svg'}, and .json for https://ui.perfetto.dev")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps each, of a smaller GPT: does it work at all?")
    parser.add_argument("--arm", choices=ARMS, help="one arm only: which (used by the demonstration itself)")
    parser.add_argument("--out", type=Path, help="one arm only: where its results go")
    parser.add_argument("--turns", type=int, nargs=2, help="one arm only: pipes to take turns with the other arm")
    options = parser.parse_args()
    if options.arm:
        train(options.arm, options.out, options.turns, options.quick)
        return
    OUTPUT.mkdir(exist_ok=True)
    run(options.quick)


if __name__ == "__main__":
    main()
