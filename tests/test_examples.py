"""Each example runs by the command on its first line, on two CPU ranks, and learns."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.programs import free_port, run_program

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# What the examples leave to Lightning, for those that need not show it again: `digits.py` and `pipeline_mlp.py` do.
LESS = {"PL_TRAINER_NUM_SANITY_VAL_STEPS": "0", "PL_TRAINER_ENABLE_PROGRESS_BAR": "False", "PL_TRAINER_LOGGER": "False"}
AT_THE_END = {**LESS, "PL_TRAINER_CHECK_VAL_EVERY_N_EPOCH": "2"}  # of two epochs
ONE_SHORT_EPOCH = "--trainer.max_epochs=1 --trainer.limit_train_batches=4 --trainer.limit_val_batches=2"
STOPPED = "`Trainer.fit` stopped: `max_epochs=1` reached."
RANKS = "ranks        2 on cpu"
DATA = (RANKS, "gradient communication over")
STAGES = ("stage 1 on rank 1",)
FEW_BATCHES = {**LESS, "PL_TRAINER_LIMIT_TRAIN_BATCHES": "10"}
ACCURACY, LOSS = "validation accuracy", "train loss"
# The arguments of a command, or instead of its last ones (...), what is set, what is printed, a number and its bounds.
LEARNING: dict[str, tuple[str, dict[str, str], tuple[str, ...], str, float, float]] = {
    "digits.py": ("", {}, DATA, ACCURACY, 0.9, 1.0),
    "fabric_digits.py": ("", AT_THE_END, DATA, ACCURACY, 0.9, 1.0),
    "gpt.py": ("", AT_THE_END, DATA, LOSS, 1.0, 3.0),
    "padded_lines.py": ("", LESS, DATA, LOSS, 1.0, 3.0),
    "diloco.py": ("", LESS, ("nodes every 10 steps", *DATA), LOSS, 1.0, 4.0),
    "uneven.py": ("", LESS, ("40 steps", *DATA), LOSS, 1.0, 4.0),
    "fsdp_gpt.py": ("", LESS, ("2 on cpu, 2 to a copy",), LOSS, 1.0, 4.0),
    "cli.py": (ONE_SHORT_EPOCH, {}, (RANKS, "8 MiB", STOPPED), "", 0, 0),  # the YAML file's bucket_cap_mb
    "hf_finetune.py": ("... smddp", AT_THE_END, (RANKS,), ACCURACY, 0.6, 1.0),
    "pipeline_mlp.py": ("", {}, STAGES, ACCURACY, 0.9, 1.0),
    "pipeline_gpt.py": ("--width 64 --depth 2 --steps 12", LESS, STAGES, LOSS, 1.0, 4.0),
    "pipeline_unet.py": ("", FEW_BATCHES, STAGES, LOSS, 0.0, 0.07),
    "pipeline_replicas.py": ("", LESS, (*STAGES, "gradient communication over 24 steps"), ACCURACY, 0.9, 1.0),
    "pipeline_transformers.py": ("... gpt2 --steps 3", LESS, STAGES, LOSS, 1.0, 7.0),
    "pipeline_cli.py": (ONE_SHORT_EPOCH, {}, ("1f1b, 4 micro-batches", STOPPED), "", 0, 0),
}
FILES = {"fsdp_gpt.py": ["gpt.ckpt"], "pipeline_gpt.py": ["pipeline_timeline.svg", "pipeline_timeline.json"]}
OTHERS = ["resume.py", "multinode.py", "demo.py", "demo_pipeline.py", "demo_turns.py", "models.py"]
MAX_LINES = {"hf_finetune.py": 80, "demo.py": 400, "demo_pipeline.py": 400}


def run(
    command: list[str], directory: Path, timeout: float = 110, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command whose paths are relative to the repository, in a directory of its own."""
    absolute = [str(ROOT / word) if word.startswith("examples/") else word for word in command]
    environment = {"COLUMNS": "100", **(more or {})}
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


def test_examples_are_short_and_say_how_to_run_them() -> None:
    for name in [*LEARNING, "resume.py", *MAX_LINES]:
        limit = 80 if name.startswith("pipeline_") else 60
        assert len((EXAMPLES / name).read_text().splitlines()) <= MAX_LINES.get(name, limit)
        first_line_command(name)
    for name in ("slurm.sbatch", "mpirun.sh"):
        lines = (EXAMPLES / name).read_text().splitlines()
        assert len(lines) <= 80
        assert lines[0] == "#!/bin/bash"
        assert f"examples/{name}" in lines[1]


def test_no_example_was_forgotten() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted([*LEARNING, *OTHERS])
    listed = (EXAMPLES / "README.md").read_text()
    there = [name for name in os.listdir(EXAMPLES) if not name.startswith((".", "__"))]  # not Jupyter's folders
    assert [name for name in there if f"({name})" not in listed] == ["README.md"]


@pytest.mark.slow
def test_resume_example_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    stopped = run(first_line_command("resume.py"), tmp_path, more=LESS)
    assert stopped.returncode == 143, stopped.stderr
    assert "SIGTERM: all ranks stop at step 1" in stopped.stdout
    resumed = run(first_line_command("resume.py"), tmp_path, more=LESS)
    assert resumed.returncode == 0, resumed.stderr
    assert "the run goes on from" in resumed.stdout
    other = tmp_path / "unbroken"
    other.mkdir()
    unbroken = run(first_line_command("resume.py"), other, more={**LESS, "UNBROKEN": "1"})
    assert unbroken.stdout.splitlines()[-1] == resumed.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_example_learns_on_two_ranks(name: str, tmp_path: Path) -> None:
    arguments, more, said, label, low, high = LEARNING[name]
    if arguments.startswith("..."):
        pytest.importorskip("transformers")
    command = first_line_command(name)
    command = command[:-1] if arguments.startswith("...") else command
    result = run([*command, *arguments.removeprefix("...").split()], tmp_path, more=more)
    assert result.returncode == 0, result.stderr
    assert "The loss of" not in result.stderr  # no warning about its weights
    assert [text for text in said if text not in result.stdout + result.stderr] == []
    assert not label or low <= number_after(label, result.stdout) <= high
    assert [file for file in FILES.get(name, []) if not (tmp_path / file).stat().st_size] == []


# ---- several nodes, each of which has a directory of its own, and one that all see ----


def run_on_each(commands: list[list[str]], environments: list[dict[str, str]], directory: Path) -> list[str]:
    """Run one command for each node (or task) at the same time; what each has printed and logged."""
    shared = directory / "multinode_checkpoints"
    shared.mkdir()
    places = [directory / f"node{index}" for index in range(len(commands))]
    for place in places:
        place.mkdir()
        (place / shared.name).symlink_to(shared)
    with ThreadPoolExecutor(len(commands)) as pool:
        jobs = [
            pool.submit(run, command, place, 100, {"CUDA_VISIBLE_DEVICES": "", **LESS, **environment})
            for command, place, environment in zip(commands, places, environments, strict=True)
        ]
        results = [job.result() for job in jobs]
    for result in results:
        assert result.returncode == 0, result.stderr
    assert (shared / "last.ckpt").exists()
    return [result.stdout + result.stderr for result in results]


@pytest.mark.slow
def test_multinode_example_under_two_agents_of_torchrun(tmp_path: Path) -> None:
    words = (EXAMPLES / "multinode.py").read_text().splitlines()[0].removeprefix("# ").split()
    line = " ".join(["-m", "torch.distributed.run", "--local-addr=127.0.0.1", *words[1:]])
    for what, here in (("--nproc-per-node=4", "--nproc-per-node=1"), ("host0", f"127.0.0.1:{free_port()}")):
        assert line.count(what) == 1
        line = line.replace(what, here)
    first, second = run_on_each([line.split()] * 2, [{}, {}], tmp_path)
    assert 0.9 <= number_after("validation accuracy", first + second) <= 1.0
    assert (first + second).count("Started by torchrun") == 1  # rank 0
    again = run_program(["-m", "torch.distributed.run", "--nproc-per-node=1", str(EXAMPLES / "multinode.py")], tmp_path)
    assert again.returncode == 0, again.stderr
    assert "nothing is left to do" in again.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)")
def test_mpirun_example(tmp_path: Path) -> None:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False)
    if "Open MPI" not in version.stdout:
        pytest.skip(f"mpirun is not Open MPI's: {version.stdout}")
    words = (EXAMPLES / "mpirun.sh").read_text().splitlines()[1].removeprefix("# ").split()
    command = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "COLUMNS": "100"}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        [*command, "--strategy", "smddp_pipeline"],
        env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "stage 1 on rank 1" in result.stdout
    assert 0.9 <= number_after("validation accuracy", result.stdout) <= 1.0


SBATCH = EXAMPLES / "slurm.sbatch"


def sbatch_options() -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH.read_text(), re.MULTILINE)
    assert len(found) == SBATCH.read_text().count("#SBATCH")
    return dict(found)


@pytest.mark.parametrize("code", [0, 1, 143])
def test_slurm_example_is_queued_again_when_it_was_stopped(code: int, tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands."""
    for name, text in (("srun", f"exit {code}"), ("scontrol", f"echo $* > {tmp_path}/asked")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    result = subprocess.run(["bash", str(SBATCH)], env=environment, check=False, timeout=20)
    assert result.returncode == code
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == ("requeue 17\n" if code == 143 else "")


@pytest.mark.slow
def test_slurm_example_as_two_tasks(tmp_path: Path) -> None:
    """With what srun sets for them."""
    options = sbatch_options()
    assert (options["nodes"], options["ntasks-per-node"], options["signal"]) == ("2", "4", "TERM@120")
    [line] = re.findall(r"^srun (?:--\S+ )*python (.*) \"\$@\"$", SBATCH.read_text(), re.MULTILINE)
    job = {"SLURM_JOB_ID": "81234", "SLURM_JOBID": "81234", "SLURM_JOB_NAME": options["job-name"]}
    job |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost", "SLURM_STEP_NODELIST": "localhost"}
    job |= {"SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURMD_NODENAME": "localhost"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2"}
    job |= {"SLURM_STEP_ID": "0", "MASTER_PORT": str(free_port())}  # else a port that follows from the job's number
    tasks = [{**job, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    first, _ = run_on_each([line.split()] * 2, tasks, tmp_path)
    assert "Started by srun" in first
    assert RANKS in first
    assert 0.9 <= number_after("validation accuracy", first) <= 1.0


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
    assert (tmp_path / "demo_output" / "pipeline_timeline.svg").read_text().startswith("<?xml")
    difference = re.search(r"smddp_pipeline[^\n]* (\d\.\de[-+]\d\d) ", result.stdout)
    assert difference, result.stdout
    assert float(difference.group(1)) < 1e-5
