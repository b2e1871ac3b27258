# python examples/demo.py
"""One model, three ways: a single device, Lightning's ``ddp`` and ``smddp`` on two ranks, on the CPU of this machine.

Every arm sees the same global batches from the same initial weights, so the three loss curves have to coincide; the
step times need not. Each arm is a process of its own that trains through the ordinary Trainer (``--arm``). They
work in turns, so that a busy moment of the machine hits all alike. Then ``demo_pipeline.py`` runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import time
from pathlib import Path

import demo_pipeline
import numpy as np
from demo_turns import OUTPUT, Arm, print_table, quiet, run_in_turns, take_turn

TASKS = {"digits": "CNN on scikit-learn's digits", "gpt": "byte-level GPT on Python's standard library"}
ARMS = {"single": "one device", "ddp": "ddp", "smddp": "smddp"}
HEADER = ["", "ranks", "train loss", "acc.", "step, ms", "sync", "loss", "weights"]
STEPS = {"digits": 132, "gpt": 120}
TURN_STEPS = 3  # arms alternate after so many steps
TIMED_PAIRS = {False: 25, True: 1}  # of steps with and without synchronisation; True: quick


# ---- one arm, in a process of its own (with two ranks: in two) ----


def train(task: str, arm: str, out: Path, turns: list[int], quick: bool) -> None:
    """Train ``task`` and write losses, times and weights to ``out``.json and ``out``.npy.

    ``turns``: a pipe to read a turn from, and one to write to at a turn's end.
    """
    quiet()
    import lightning as L
    import torch
    import torch.nn.functional as F
    from digits import Digits, DigitsData
    from models import GPT, standard_library
    from torch.utils.data import DataLoader, Subset

    class Stopwatch(L.Callback):
        """Times whole steps; after the last one, what synchronisation adds to forward and backward."""

        def __init__(self) -> None:
            self.losses: list[torch.Tensor] = []
            self.step_ms: list[float] = []
            self.sync_ms: float | None = None
            self.report = None

        def setup(self, trainer, module, stage) -> None:
            take_turn(trainer, turns)

        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            if len(self.step_ms) % TURN_STEPS == 0:
                take_turn(trainer, turns)
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            self.step_ms.append(1e3 * (time.perf_counter() - self.started))
            self.losses.append(outputs["loss"].detach())
            self.batch = batch

        def on_train_end(self, trainer, module) -> None:
            self.report = getattr(trainer.strategy, "communication_report", None)
            take_turn(trainer, turns)
            if trainer.world_size > 1:
                self.sync_ms = self.time_sync(trainer.strategy)

        def time_sync(self, strategy) -> float:
            """Median, over pairs, of a step with synchronisation less one without (DDP's ``no_sync``)."""

            def step_ms() -> float:
                ddp.zero_grad()
                strategy.barrier()
                started = time.perf_counter()
                if task == "gpt":
                    tokens = self.batch[0].long()
                    F.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                else:
                    F.cross_entropy(ddp(self.batch[0]), self.batch[1]).backward()
                return 1e3 * (time.perf_counter() - started)

            ddp, differences = strategy.model, []
            for _ in range(TIMED_PAIRS[quick]):
                synced = step_ms()
                with ddp.no_sync():
                    differences.append(synced - step_ms())
            return statistics.median(differences)

    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    ranks = 1 if arm == "single" else 2
    steps = 4 if quick else STEPS[task]
    if task == "digits":
        data = DigitsData(batch_size=360)
        model, train_data, val = Digits(), data.train, data.val_dataloader()
    else:
        size = {"width": 64, "depth": 2, "heads": 2} if quick else {}
        model, train_data, val = GPT(**size), standard_library(samples=16 * steps), None
    stopwatch = Stopwatch()
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy="auto" if arm == "single" else arm, max_steps=steps, max_epochs=-1,
        callbacks=[stopwatch], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, check_val_every_n_epoch=None, val_check_interval=steps,
        use_distributed_sampler=False,
    )  # fmt: skip
    # Lightning's sampler would shuffle by rank; here rank r of 2 takes samples r, r + 2, ..., in order, so that the
    # two ranks' batches together are the single device's.
    global_batch = 64 if task == "digits" else 16
    whole_batches = len(train_data) // global_batch * global_batch
    train_data = Subset(train_data, range(trainer.global_rank, whole_batches, ranks))
    trainer.fit(model, DataLoader(train_data, global_batch // ranks), val)
    losses = trainer.strategy.reduce(torch.stack(stopwatch.losses), reduce_op="mean")
    if torch.distributed.is_initialized():  # Lightning leaves gloo's group, whose threads may abort the process's end
        torch.distributed.destroy_process_group()
    if not trainer.is_global_zero:
        return
    report, accuracy = stopwatch.report, trainer.callback_metrics.get("val_accuracy")
    result = {
        "ranks": ranks,
        "losses": losses.tolist(),
        "accuracy": None if accuracy is None else float(accuracy),
        "step_ms": statistics.median(stopwatch.step_ms),
        "best_ms": min(stopwatch.step_ms),
        "sync_ms": stopwatch.sync_ms,
        "report": None if report is None else str(report),
    }
    out.with_suffix(".json").write_text(json.dumps(result))
    np.save(out.with_suffix(".npy"), torch.cat([p.detach().flatten() for p in model.parameters()]).numpy())


# ---- all arms, and what came out ----


def run(task: str, quick: bool) -> dict[str, dict]:
    """Run a task's arms."""
    options = ["--task", task, *["--quick"] * quick]
    arms = {arm: Arm(__file__, ["--arm", arm, *options], f"{task}-{arm}") for arm in ARMS}
    results = run_in_turns(arms)
    return {arm: {**result, "weights": np.load(arms[arm].out.with_suffix(".npy"))} for arm, result in results.items()}


def row(arm: str, results: dict[str, dict]) -> list[str]:
    """An arm's line of the table."""
    result, single, ddp = results[arm], results["single"], results["ddp"]
    ours, theirs = np.array(result["losses"]), np.array(single["losses"])
    cells = [ARMS[arm], str(result["ranks"]), f"{ours[0]:.2f} > {ours[-1]:.3f}"]
    cells.append("" if result["accuracy"] is None else f"{result['accuracy']:.3f}")
    cells.append(f"{result['step_ms']:.3g} ({result['best_ms']:.3g})")
    cells.append("" if result["sync_ms"] is None else f"{result['sync_ms']:.1f}")
    if arm == "single":
        return [*cells, "", ""]
    cells.append(f"{np.max(np.abs(ours - theirs) / np.abs(theirs)):.1e}")
    difference = np.max(np.abs(result["weights"] - ddp["weights"]))
    cells.append("" if arm == "ddp" else "bit-equal" if difference == 0 else f"{difference:.1e}")
    return cells


def print_results(everything: dict[str, dict[str, dict]], quick: bool) -> None:
    """The one table."""
    sections = {task: [row(arm, results) for arm in results] for task, results in everything.items()}
    print_table("same seed, same global batches", HEADER, sections)
    print("1 thread each. step: median (best) time of forward, backward, optimizer on rank 0.")
    print(f"sync: ms that it adds; forward and backward with it less without (no_sync), {TIMED_PAIRS[quick]} pairs.")
    print("loss: largest relative difference of the training loss from one device. weights: from ddp.")


def draw(everything: dict[str, dict[str, dict]], path: Path) -> None:
    """Loss curves that coincide, and bars of step times with the part that synchronisation adds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    styles = {"single": ("0.7", "-", 5), "ddp": ("tab:blue", "-", 1.8), "smddp": ("tab:orange", ":", 2.2)}
    for task, results in everything.items():
        for arm, (color, line, width) in styles.items():
            label = ARMS[arm] if task == "gpt" else None
            left.plot(results[arm]["losses"], color=color, linestyle=line, linewidth=width, label=label)
        left.annotate(task, (len(results["single"]["losses"]), results["single"]["losses"][-1]), fontsize=9)
    left.set(title="Training loss: the curves coincide", xlabel="step", ylabel="cross-entropy")
    left.set_yscale("log")
    left.legend()
    names, middle = list(everything), np.arange(len(everything))
    for offset, (arm, (color, _, _)) in zip((-0.27, 0, 0.27), styles.items(), strict=True):
        steps = [everything[task][arm]["step_ms"] for task in names]
        syncs = [max(0.0, everything[task][arm]["sync_ms"] or 0.0) for task in names]
        bars = right.bar(middle + offset, steps, 0.25, color=color, label=ARMS[arm])
        right.bar_label(bars, [f"{step:.1f}" for step in steps], fontsize=8)
        bottoms = [step - sync for step, sync in zip(steps, syncs, strict=True)]
        right.bar(middle + offset, syncs, 0.25, bottoms, color="none", edgecolor="black", hatch="////", linewidth=0.8)
        right.plot(middle + offset, [everything[task][arm]["best_ms"] for task in names], "k.")
    right.plot([], [], "k.", label="fastest step")
    right.bar([0], [0], color="none", edgecolor="black", hatch="////", label="added by synchronisation")
    right.set(title="Step time, median, ms (two ranks share the batch)", xticks=middle, xticklabels=names)
    right.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps each, of a smaller GPT: does it work at all?")
    parser.add_argument("--task", choices=TASKS, help="one arm only: which model (used by the demonstration itself)")
    parser.add_argument("--arm", choices=ARMS, help="one arm only: which strategy")
    parser.add_argument("--out", type=Path, help="one arm only: where its results go")
    parser.add_argument("--turns", type=int, nargs=2, help="one arm only: pipes to take turns with the other arms")
    options = parser.parse_args()
    if options.arm:
        train(options.task, options.arm, options.out, options.turns, options.quick)
        return
    started = time.perf_counter()
    OUTPUT.mkdir(exist_ok=True)
    shutil.rmtree(OUTPUT / "cache", ignore_errors=True)
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if cores < 2 or load > 0.5:
        print(f"note: {cores} core(s), load {load:.1f}: two ranks want two idle cores, or the times say little")
    everything: dict[str, dict[str, dict]] = {}
    for task, title in TASKS.items():
        print(f"training the {title}: {', '.join(ARMS.values())}, in turns ...", flush=True)
        everything[task] = run(task, options.quick)
    ours = everything["gpt"]["smddp"]
    print(f'\nWhat strategy="smddp" says at the start and at the end of fit:\n\n{ours["table"]}\n{ours["report"]}\n')
    print_results(everything, options.quick)
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
    else:
        draw(everything, OUTPUT / "demo.png")
        print(f"picture: {OUTPUT / 'demo.png'}")
    print()
    demo_pipeline.run(options.quick)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
