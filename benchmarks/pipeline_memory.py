"""Memory of a rank in a pipeline, against one process: parameters, gradients, Adam's state, and what training adds.

The model is made in ``configure_model`` with ``meta_init``, so that no rank ever holds more than its own part. Each
rank reports the bytes of its tensors, and the peak of its resident memory above what it had before ``Trainer.fit``.

With larger batches, also what ``activation_checkpointing`` saves: the peak of a step that is not the first.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Record, launch, parser, table, target
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from models import ByteGPT
from pipeline_models import cross_entropy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import CommunicationOptions, PipelineStrategy

MIB = 2**20
STEPS = 2
_M_MMAP_THRESHOLD = -3  # of malloc.h


class BigGPT(LightningModule):
    """A GPT whose layers are made when the strategy says so."""

    def __init__(self, width: int, layers: int, rows: int) -> None:
        super().__init__()
        self.width, self.layers, self.rows = width, layers, rows

    def configure_model(self) -> None:
        """Make the layers."""
        self.gpt = ByteGPT(self.width, self.layers, self.width // 64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of a batch."""
        return cross_entropy(self.gpt(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        """Two batches of ``rows`` x 64 bytes."""
        text = torch.randint(256, (self.rows * STEPS, 65), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()), batch_size=self.rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, with two numbers of state a parameter."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class StateBytes(Callback):
    """Bytes of parameters, gradients and optimizer state at the end of the last step; peaks of resident memory."""

    def __init__(self) -> None:
        self.parts = [0, 0, 0]
        self.peak = self.last_peak = 0  # of all, and from the end of the first step on

    def on_before_zero_grad(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Gradients exist now; the state exists from the second step on."""
        # Those of other ranks are of another class in hooks: they have a shape, and no memory here.
        parameters = [p for p in module.parameters() if type(p) is nn.Parameter and not p.is_meta]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        now = [sum(t.nbytes for t in tensors) for tensors in (parameters, gradients, state)]
        self.parts = [max(pair) for pair in zip(self.parts, now, strict=True)]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """The state is complete."""
        self.on_before_zero_grad(trainer, module, trainer.optimizers[0])
        self.last_peak = _resident("VmHWM")
        self.peak = max(self.peak, self.last_peak)
        _start_peak()


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=768)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--rows", type=int, default=256, help="of a batch of the second part")
    args = options.parse_args()
    if args.quick:
        args.width, args.layers, args.ranks, args.rows = 256, 8, [2], 64
    record = Record(
        "pipeline_memory",
        "Memory of a rank of a pipeline",
        args,
        "one process's memory divided by the number of ranks.",
    )
    layout = {"width": args.width, "layers": args.layers, "rows": 8}
    found = {ranks: launch("pipeline_memory:rank_main", ranks, layout) for ranks in [1, *args.ranks]}
    record.data["ranks"] = found
    one = found[1][0]
    rows, targets = [], []
    for ranks, reports in found.items():
        state, peak = (max(report[key] for report in reports) for key in ("state", "peak"))
        shares = [state / one["state"] * ranks, peak / one["peak"] * ranks]
        biggest = max(reports, key=lambda report: report["state"])
        rows.append([f"{ranks}", *(part / MIB for part in biggest["parts"]), state / MIB, peak / MIB, *shares])
        if ranks > 1:
            targets.append(target(f"{ranks} ranks, state x ranks / one process", shares[0], 1.15, False))
            targets.append(f"- {ranks} ranks, peak x ranks / one process: {shares[1]:.2f}")
    headings = ["ranks", "parameters", "gradients", "Adam", "state", "peak", "state, of ideal", "peak, of ideal"]
    record.section(
        f"GPT of width {args.width} with {args.layers} layers, {one['parts'][0] / 4e6:.0f} M parameters",
        table(headings, rows),
        "MiB of the rank that has most. *Peak* is of resident memory, above what the process had before the fit; it "
        "contains activations, messages and code. *Of ideal* is times ranks / one process. malloc gives large "
        "tensors back when they are freed (`MALLOC_MMAP_THRESHOLD_=65536`), else it keeps some of what was freed.",
        "\n".join(targets),
    )
    report_activations(record, args)
    record.finish()


def report_activations(record: Record, args: argparse.Namespace) -> None:
    """What ``activation_checkpointing`` saves."""
    layout = {"width": 256, "layers": 16, "rows": args.rows}
    ranks = args.ranks[0]
    found = {
        checkpointing: launch("pipeline_memory:rank_main", ranks, {**layout, "checkpointing": checkpointing})
        for checkpointing in (False, True)
    }
    record.data["activation_checkpointing"] = {str(checkpointing): reports for checkpointing, reports in found.items()}
    rows = []
    for rank in range(ranks):
        plain, sparing = (found[checkpointing][rank] for checkpointing in (False, True))
        above = [(report["last_peak"] - report["state"]) / MIB for report in (plain, sparing)]
        peaks = [report["last_peak"] / MIB for report in (plain, sparing)]
        rows.append([f"{rank}", plain["state"] / MIB, *peaks, *above, above[1] / above[0]])
    headings = ["rank", "state", "peak", "peak, checkpointing", "above state", "above, checkpointing", "ratio"]
    record.section(
        f"`activation_checkpointing=True`: GPT of width 256 with 16 layers on {ranks} ranks, {args.rows} x 64 bytes",
        table(headings, rows),
        "MiB. *Peak* is that of the second step. Above the state are activations, messages, the logits and their "
        "gradients, temporary memory and code.",
    )


def rank_main(width: int, layers: int, rows: int, checkpointing: bool = False) -> list[dict[str, Any]]:
    """State and peaks of each rank, in bytes, without what malloc keeps of what was freed."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ranks, callback = dist.get_world_size(), StateBytes()
    options: dict[str, Any] = {"num_microbatches": 8, "meta_init": True}
    options["communication"] = CommunicationOptions(verbose=False)
    strategy = PipelineStrategy(**options, activation_checkpointing=checkpointing) if ranks > 1 else "auto"
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=1,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],
    )
    before = _resident("VmRSS")
    _start_peak()
    trainer.fit(BigGPT(width, layers, rows))
    peak, last_peak = max(callback.peak, _resident("VmHWM")) - before, callback.last_peak - before
    everyone: list[Any] = [None] * ranks
    mine = {"state": sum(callback.parts), "peak": peak, "last_peak": last_peak, "parts": callback.parts}
    dist.all_gather_object(everyone, mine)
    return everyone


def _start_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    """Bytes, from ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
