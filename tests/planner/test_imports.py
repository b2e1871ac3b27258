"""The planner is plain Python: importing it loads no heavy library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightning_smddp.planner

HEAVY = {"torch", "lightning", "pytorch_lightning", "matplotlib", "numpy"}


def test_the_planner_loads_no_heavy_library() -> None:
    folder = Path(lightning_smddp.planner.__file__).parent
    modules = ", ".join(f"lightning_smddp.planner.{path.stem}" for path in folder.glob("[a-z]*.py"))
    result = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print(sorted({HEAVY!r} & set(sys.modules)))"],
        cwd=folder.parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
