"""Each example runs by the command on its first line, on two CPU ranks, and learns."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SMALL = ["digits.py", "gpt.py", "fabric_digits.py", "cli.py", "resume.py"]
PIPELINES = [
    "pipeline_mlp.py", "pipeline_gpt.py", "pipeline_transformers.py", "pipeline_unet.py", "pipeline_replicas.py",
    "pipeline_cli.py",
]  # fmt: skip
OTHERS = ["demo.py", "demo_pipeline.py", "demo_turns.py", "models.py"]  # longer, or not to be run
MAX_LINES = {**dict.fromkeys(SMALL, 60), **dict.fromkeys(PIPELINES, 80)}


def run(command: list[str], directory: Path, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    """Run a command whose paths are relative to the repository, in a directory of its own."""
    absolute = [str(ROOT / word) if word.startswith("examples/") else word for word in command]
    environment = {"XDG_CACHE_HOME": str(directory / "cache"), "COLUMNS": "100"}
    return run_program(absolute, directory, environment, timeout)


def first_line_command(name: str) -> list[str]:
    line = (EXAMPLES / name).read_text().splitlines()[0]
    words = line.removeprefix("# ").split()
    assert words[:2] == ["python", f"examples/{name}"], line
    return words[1:]


def number_after(label: str, output: str) -> float:
    found = re.search(rf"{label}\W+(\d+\.\d+)", output)
    assert found, f"no {label!r} in:\n{output}"
    return float(found.group(1))


@pytest.mark.parametrize("name", [*SMALL, *PIPELINES, "demo.py", "demo_pipeline.py"])
def test_examples_are_short_and_say_how_to_run_them(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= MAX_LINES.get(name, 400)
    first_line_command(name)


def test_no_example_was_forgotten() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted([*SMALL, *PIPELINES, *OTHERS])


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
def test_resume_example_goes_on_as_if_it_had_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = run(first_line_command("resume.py"), tmp_path)
    assert stopped.returncode == 143, stopped.stderr
    assert "SIGTERM: all ranks stop at step 3" in stopped.stdout
    resumed = run(first_line_command("resume.py"), tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "the run goes on from" in resumed.stdout
    monkeypatch.setenv("UNBROKEN", "1")
    other = tmp_path / "unbroken"
    other.mkdir()
    unbroken = run(first_line_command("resume.py"), other)
    assert unbroken.stdout.splitlines()[-1] == resumed.stdout.splitlines()[-1]


@pytest.mark.slow
def test_cli_example_takes_the_strategy_from_yaml(tmp_path: Path) -> None:
    result = run(first_line_command("cli.py"), tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2 ranks on cpu" in result.stdout
    assert "8 MiB" in result.stdout  # the YAML file's bucket_cap_mb
    assert "`Trainer.fit` stopped: `max_epochs=3` reached." in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label", "low", "high"),
    [
        ("pipeline_mlp.py", "validation accuracy", 0.9, 1.0),
        ("pipeline_gpt.py", "train loss", 1.0, 3.0),
        ("pipeline_unet.py", "train loss", 0.0, 0.07),
        ("pipeline_replicas.py", "validation accuracy", 0.9, 1.0),
    ],
)
def test_pipeline_example_learns(name: str, label: str, low: float, high: float, tmp_path: Path) -> None:
    result = run(first_line_command(name), tmp_path)
    assert result.returncode == 0, result.stderr
    assert "stage 1 on rank 1" in result.stdout
    assert "The loss of" not in result.stderr  # no warning about its weights
    assert low <= number_after(label, result.stdout) <= high
    if name == "pipeline_gpt.py":
        assert (tmp_path / "pipeline_timeline.svg").read_text().startswith("<svg")
        assert json.loads((tmp_path / "pipeline_timeline.json").read_text())
    if name == "pipeline_replicas.py":
        assert "gradient communication over 69 steps" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "vit", "mixtral"])
def test_transformers_example(model: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = first_line_command("pipeline_transformers.py")
    result = run([*command[:-1], model, "--steps", "6"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "stage 1 on rank 1" in result.stdout
    assert 1.0 <= number_after("train loss", result.stdout) <= 7.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [[], ["--trainer.strategy", "smddp_pipeline"]], ids=["class_path", "name"])
def test_cli_example_takes_the_pipeline_from_yaml(strategy: list[str], tmp_path: Path) -> None:
    result = run([*first_line_command("pipeline_cli.py"), *strategy], tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"1f1b, {8 if strategy else 4} micro-batches" in result.stdout
    assert "`Trainer.fit` stopped: `max_epochs=3` reached." in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_runs_and_its_arms_agree(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(["examples/demo.py", "--quick"], tmp_path, timeout=280)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "Warning" not in result.stdout
    assert result.stdout.count("bit-equal") == 2  # both models: smddp's weights and ddp's
    assert (tmp_path / "demo_output" / "demo.png").stat().st_size > 10_000
    assert (tmp_path / "demo_output" / "pipeline_timeline.svg").read_text().startswith("<svg")
    difference = re.search(r"smddp_pipeline[^\n]* (\d\.\de[-+]\d\d) ", result.stdout)
    assert difference, result.stdout
    assert float(difference.group(1)) < 1e-5
