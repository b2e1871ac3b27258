"""How far the average of ranks' gradients is from that of all their batches at once, where texts are padded.

In one process, as it is about numbers alone: the batches of N ranks are cut from one, and their gradients averaged as
DDP does it, all ranks alike. (``loss_weight="labels"`` is compared with one process in the tests.)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import Record, parser, table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from padded_lines import LineGPT, lines

ROWS = 8  # of a rank


def gradient(model: LineGPT, tokens: Tensor, labels: Tensor) -> Tensor:
    """That of the mean over labels, as one vector."""
    model.zero_grad()
    logits = model(tokens).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, labels.flatten()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--batches", type=int, default=10)
    options.add_argument("--steps", type=int, default=200, help="of training, before")
    args = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LineGPT(width=96, depth=2, heads=3)
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(1))
    data = lines(1024)
    optimizer = model.configure_optimizers()
    for step in range(args.steps):
        gradient(model, *data[order[torch.arange(16 * step, 16 * step + 16) % 1024]])
        optimizer.step()
    title, ceiling = "Gradients of padded batches", "the gradient of all batches at once."
    record = Record("loss_weight", title, args, ceiling, method="Nothing is timed.")
    rows = []
    for ranks in [2] if args.quick else [2, 4, 8, 16]:
        errors = []
        for start in range(args.batches):
            chosen = order[torch.arange(start * 32, start * 32 + ranks * ROWS) % 1024]
            tokens, labels = data[chosen]
            whole = gradient(model, tokens, labels)
            parts = list(zip(tokens.chunk(ranks), labels.chunk(ranks), strict=True))
            average = torch.stack([gradient(model, *part) for part in parts]).mean(0)
            errors.append((average - whole).norm() / whole.norm())
        median = torch.stack(errors).median().item()
        record.data[str(ranks)] = median
        rows.append([ranks, f"{100 * median:.1f} %"])
    record.section(
        "Distance to the gradient of all batches at once",
        f"Relative, in the Euclidean norm; the median of {args.batches} batches of {ROWS} lines on each rank, "
        f"behind {args.steps} steps.",
        table(["ranks", "average of ranks, as DDP makes it"], rows),
    )
    record.finish()


if __name__ == "__main__":
    main()
