"""Rare synchronisation between nodes: tokens a second over a slow network, and the loss behind equally many tokens.

Two nodes of two ranks on one machine, as in `multinode.py`, train the byte-level GPT of the examples. Needs root, `ip`
and `tc`; skips itself otherwise.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Record, launch, parser, table, target
from lightning.pytorch import Callback, Trainer, seed_everything
from multinode import ORDERS, RANKS, _limit, _missing, _two_nodes
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, standard_library

EVERY = 30  # steps of a round
MOMENTUM = 0.7  # of the outer SGD, as the training is short
TOKENS = 32  # of a rank in a step that is timed: four ranks share two cores, so that a step is soon long
DDP, SMDDP, HALF, DILOCO = "ddp", "smddp", "smddp, bf16", f"DiLoCo, H = {EVERY}"
DILOCO_HALF = f"{DILOCO}, bf16"
METHOD = """\
Arms train in turns, in a new random order each time, two rounds of DiLoCo each: from the begin of the second batch to
that of the last one, so that both synchronisations are within. A rank has 32 tokens in a step, as four ranks share two
cores. *Loss* is of 512 sequences that nobody has trained on, behind equally many steps of 256 tokens a rank, by a
smaller GPT over a link without a limit. The momentum of DiLoCo's outer steps is 0.7, as the training is short."""


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--gbit", type=float, default=1.0, help="rate of the link, Gbit/s")
    options.add_argument("--rounds", type=int, default=5, help="turns of each arm")
    options.add_argument("--seeds", type=int, default=3, help="of the losses")
    options.add_argument("--steps", type=int, default=2700, help="behind which losses are compared")
    args = options.parse_args()
    if args.quick:
        args.rounds, args.seeds, args.steps = 1, 1, 90
    reason = _missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    record = Record(
        "diloco",
        f"GPT on 2 nodes of 2 ranks at {args.gbit:g} Gbit/s: nodes that synchronise every {EVERY} steps",
        args,
        "a network that costs nothing. Four ranks share this machine's CPUs, which is what is left of a step then.",
        METHOD,
    )
    with _two_nodes() as (namespaces, interfaces):
        prefixes = [
            ["ip", "netns", "exec", namespaces[node], "env", f"GLOO_SOCKET_IFNAME={interfaces[node]}"]
            for node in ORDERS["contiguous"]
        ]
        _limit(namespaces, interfaces, args.gbit)
        speeds = launch("diloco:speed_main", RANKS, {"rounds": args.rounds}, prefixes)
        _limit(namespaces, interfaces, 100.0)
        losses = launch("diloco:loss_main", RANKS, {"seeds": args.seeds, "steps": args.steps}, prefixes)
    record.data.update(tokens_per_s=speeds, losses=losses)
    medians = {arm: statistics.median(values) for arm, values in speeds.items()}
    rows = [[arm, max(speeds[arm]), value, value / medians[DDP]] for arm, value in medians.items()]
    record.section("Tokens a second, all ranks", table(["arm", "best", "median", "x ddp"], rows))
    means = {arm: statistics.mean(values) for arm, values in losses.items()}
    rows = [[arm, f"{mean:.4f}", *(f"{value:.4f}" for value in losses[arm])] for arm, mean in means.items()]
    record.section(
        f"Validation loss behind {args.steps} steps",
        table(["arm", "mean", *(f"seed {seed}" for seed in range(args.seeds))], rows),
    )
    more = 100 * (means[DILOCO] / means[DDP] - 1)
    targets = [
        target(f"{DILOCO} / {DDP}, tokens a second", medians[DILOCO] / medians[DDP], 3, True),
        target(f"{DILOCO} / {HALF}, tokens a second", medians[DILOCO] / medians[HALF], 2, True),
        target(f"{DILOCO_HALF} / {HALF}, tokens a second", medians[DILOCO_HALF] / medians[HALF], 2, True),
        target("loss above that of ddp", more, 1, False, " %"),
    ]
    record.section("Targets", "\n".join(targets))
    record.finish()


class Timed(Callback):
    """From the begin of the second batch to that of the last one."""

    def on_train_batch_start(self, trainer: Trainer, module: GPT, batch: Any, batch_idx: int) -> None:
        """All ranks take their own times."""
        if batch_idx == 1:
            self.start = time.perf_counter()
        self.end = time.perf_counter()


def _strategy(arm: str) -> Any:
    from lightning_smddp import CommunicationOptions, DiLoCo, SMDDPStrategy

    more: dict[str, dict[str, Any]] = {
        SMDDP: {},
        HALF: {"compression": "bf16"},
        DILOCO: {"sync": DiLoCo(EVERY, momentum=MOMENTUM)},
        DILOCO_HALF: {"sync": DiLoCo(EVERY, momentum=MOMENTUM, compression="bf16")},
    }
    return "ddp" if arm == DDP else SMDDPStrategy(communication=CommunicationOptions(verbose=False), **more[arm])


class FusedGPT(GPT):  # type: ignore[misc]  # examples have no types
    """With torch's fast optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For all arms."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


def _fit(arm: str, module: GPT, loader: DataLoader[Any], steps: int, callbacks: list[Callback]) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy=_strategy(arm),
        callbacks=callbacks,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def _as_by_torchrun() -> None:
    rank = dist.get_rank()
    nodes = ORDERS["contiguous"]
    os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_RANK=str(nodes[:rank].count(nodes[rank])), LOCAL_WORLD_SIZE="2")
    os.environ.update(GROUP_RANK=str(nodes[rank]), TORCHELASTIC_RUN_ID="diloco")
    os.environ.update(MASTER_ADDR="10.203.0.1", MASTER_PORT="29500")  # of the first node, in a namespace of its own
    dist.destroy_process_group()  # for the one that the first Trainer makes
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def speed_main(rounds: int) -> dict[str, list[float]]:
    """Tokens a second by arm, of each turn."""
    _as_by_torchrun()
    order, loader = random.Random(0), DataLoader(standard_library(100 * RANKS, TOKENS), shuffle=True)
    speeds: dict[str, list[float]] = {arm: [] for arm in (DDP, SMDDP, HALF, DILOCO, DILOCO_HALF)}
    for turn in range(-1, rounds):  # the first one is not counted
        for arm in order.sample(list(speeds), len(speeds)):
            seed_everything(0, verbose=False)
            timed = Timed()
            _fit(arm, FusedGPT(), loader, 2 * EVERY + 2, [timed])
            spans: list[Any] = [None] * RANKS
            dist.all_gather_object(spans, (timed.start, timed.end))
            seconds = max(end for _, end in spans) - min(start for start, _ in spans)
            if turn >= 0:
                speeds[arm].append(2 * EVERY * TOKENS * RANKS / seconds)
    return speeds


def loss_main(seeds: int, steps: int) -> dict[str, list[float]]:
    """Validation losses by arm, of each seed."""
    _as_by_torchrun()
    whole = standard_library(512 + 2**14)
    tokens, rest = whole[:512][0].long(), Subset(whole, range(512, len(whole)))
    losses: dict[str, list[float]] = {arm: [] for arm in (DDP, DILOCO)}
    for seed in range(seeds):
        for arm, found in losses.items():
            seed_everything(seed, verbose=False)
            module = FusedGPT(width=96, depth=2, heads=3)
            _fit(arm, module, DataLoader(rest, batch_size=4, shuffle=True), steps, [])
            found.append(_loss(module, tokens))
    return losses


@torch.no_grad()
def _loss(module: GPT, tokens: Tensor) -> float:
    return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()


if __name__ == "__main__":
    main()
