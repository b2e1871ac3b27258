"""Each example runs by the command on its first line, on two CPU ranks, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SMALL = ["digits.py", "gpt.py", "fabric_digits.py", "cli.py"]  # demo.py and models.py are longer
MAX_LINES = 60


def run(command: list[str], directory: Path, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    """Run a command whose paths are relative to the repository, in a directory of its own."""
    absolute = [str(ROOT / word) if word.startswith("examples/") else word for word in command]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache"), "COLUMNS": "100"}
    return subprocess.run(
        absolute, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def first_line_command(name: str) -> list[str]:
    line = (EXAMPLES / name).read_text().splitlines()[0]
    words = line.removeprefix("# ").split()
    assert words[:2] == ["python", f"examples/{name}"], line
    return [sys.executable, *words[1:]]


def number_after(label: str, output: str) -> float:
    found = re.search(rf"{label}\W+(\d+\.\d+)", output)
    assert found, f"no {label!r} in:\n{output}"
    return float(found.group(1))


@pytest.mark.parametrize("name", [*SMALL, "cli.yaml", "demo.py", "models.py"])
def test_examples_are_short_and_say_how_to_run_them(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    if name in SMALL:
        assert len(lines) <= MAX_LINES
    if name not in ("models.py", "cli.yaml"):
        first_line_command(name)


def test_no_example_was_forgotten() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted([*SMALL, "demo.py", "models.py"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label", "low", "high"),
    [
        ("digits.py", "validation accuracy", 0.9, 1.0),
        ("fabric_digits.py", "validation accuracy", 0.9, 1.0),
        ("gpt.py", "train loss", 1.0, 3.0),
    ],
)
def test_example_learns_on_two_ranks(name: str, label: str, low: float, high: float, tmp_path: Path) -> None:
    result = run(first_line_command(name), tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2 ranks on cpu" in result.stdout
    assert "gradient communication over" in result.stdout
    assert low <= number_after(label, result.stdout) <= high


@pytest.mark.slow
def test_cli_example_takes_the_strategy_from_yaml(tmp_path: Path) -> None:
    result = run(first_line_command("cli.py"), tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2 ranks on cpu" in result.stdout
    assert "8 MiB" in result.stdout  # the YAML file's bucket_cap_mb
    assert "`Trainer.fit` stopped: `max_epochs=3` reached." in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_runs_and_its_arms_agree(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run([sys.executable, "examples/demo.py", "--quick"], tmp_path, timeout=280)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "Warning" not in result.stdout
    assert result.stdout.count("bit-equal") == 2  # both models: smddp's weights and ddp's
    assert (tmp_path / "demo_output" / "demo.png").stat().st_size > 10_000
