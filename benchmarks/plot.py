"""Draw ``docs/images/speedup.png`` from the JSON of ``ddp_step.py``: the time of a training step, arm by arm.

Needs matplotlib (``pip install 'lightning-smddp[plot]'``).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BARS = {"stock DDP": "#b8bec7", "tuned DDP": "#8a929e", "smddp": "#2563eb", "no communication": "#e3e6ea"}
TITLES = {
    "mlp": "MLP, 16.8 M parameters",
    "gpt": "GPT, 10.9 M parameters",
    "gpt_short": "the same GPT, 64 bytes a rank",
}


def main() -> None:
    """Draw one panel for each model."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("json", type=Path, nargs="?", help="default: the latest in benchmarks/results/")
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "speedup.png")
    args = options.parse_args()
    found = sorted(
        (ROOT / "benchmarks" / "results").glob("ddp_step_*.json"), key=lambda path: path.stem.rsplit("_", 1)[1]
    )
    if args.json is None and not found:
        options.error("there is no result yet: run `python benchmarks/ddp_step.py --record`")
    draw(json.loads((args.json or found[-1]).read_text()), args.output)


def draw(result: dict[str, Any], output: Path) -> None:
    """``result`` is what ``ddp_step.py`` recorded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    models = result["models"]
    figure, panels = plt.subplots(1, len(models), figsize=(4.6 * len(models), 2.5), squeeze=False, layout="constrained")
    for panel, (model, data) in zip(panels[0], models.items(), strict=True):
        times = {arm: statistics.median(data["samples"][arm]["wall_ms"]) for arm in BARS}
        bars = panel.barh(list(times), list(times.values()), color=list(BARS.values()), height=0.68)
        labels = [_label(arm, ms, times["stock DDP"]) for arm, ms in times.items()]
        panel.bar_label(bars, labels, padding=4, fontsize=9)
        panel.set_xlim(0, 1.32 * max(times.values()))
        panel.set_title(TITLES.get(model, model), loc="left", fontsize=10, fontweight="bold")
        panel.invert_yaxis()
        panel.set_xticks([])
        panel.tick_params(axis="y", length=0, labelsize=9)
        panel.spines[:].set_visible(False)
    figure.supxlabel(
        f"median time of a training step; {result['hardware']}; {result['date']}", fontsize=7.5, color="#6b7280"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=160)
    print(f"drawn: {output}")


def _label(arm: str, ms: float, stock: float) -> str:
    return f"{ms:.0f} ms" if arm == "stock DDP" else f"{ms:.0f} ms  ({stock / ms:.2f}x)"


if __name__ == "__main__":
    main()
