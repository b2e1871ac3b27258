"""Memory of a rank in a pipeline, against one process: parameters, gradients, Adam's state, and what training adds.

The model is made in ``configure_model`` with ``meta_init``, so that no rank ever holds more than its own part. Each
rank reports the bytes of its tensors, and the peak of its resident memory above what it had before ``Trainer.fit``.
"""

from __future__ import annotations

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
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import PipelineStrategy

MIB = 2**20
STEPS = 2


class BigGPT(LightningModule):
    """A GPT whose layers are made when the strategy says so."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width, self.layers = width, layers

    def configure_model(self) -> None:
        """Make the layers."""
        self.gpt = ByteGPT(self.width, self.layers, self.width // 64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of a batch."""
        return cross_entropy(self.gpt(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        """Two batches of 8 x 64 bytes."""
        text = torch.randint(256, (8 * STEPS, 65), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()), batch_size=8)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, with two numbers of state a parameter."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class StateBytes(Callback):
    """Bytes of parameters, gradients and optimizer state at the end of the last step."""

    def __init__(self) -> None:
        self.parts = [0, 0, 0]

    def on_before_zero_grad(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Gradients exist now; the state exists from the second step on."""
        parameters = [p for p in module.parameters() if not p.is_meta]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        now = [sum(t.nbytes for t in tensors) for tensors in (parameters, gradients, state)]
        self.parts = [max(pair) for pair in zip(self.parts, now, strict=True)]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """The state is complete."""
        self.on_before_zero_grad(trainer, module, trainer.optimizers[0])


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=768)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = options.parse_args()
    if args.quick:
        args.width, args.layers, args.ranks = 256, 8, [2]
    record = Record(
        "pipeline_memory",
        "Memory of a rank of a pipeline",
        args,
        "one process's memory divided by the number of ranks.",
    )
    layout = {"width": args.width, "layers": args.layers}
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
        "contains activations, messages and code. *Of ideal* is times ranks / one process.",
        "\n".join(targets),
    )
    record.finish()


def rank_main(width: int, layers: int) -> list[dict[str, Any]]:
    """State and peak of each rank, in bytes."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ranks, callback = dist.get_world_size(), StateBytes()
    strategy = PipelineStrategy(num_microbatches=8, meta_init=True, verbose=False) if ranks > 1 else "auto"
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
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    trainer.fit(BigGPT(width, layers))
    peak = _resident("VmHWM") - before
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, {"state": sum(callback.parts), "peak": peak, "parts": callback.parts})
    return everyone


def _resident(field: str) -> int:
    """Bytes, from ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
