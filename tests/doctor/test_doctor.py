"""``lightning-smddp doctor``: whatever is wrong is named with its cure, and the ranks of a job answer together."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smddp.cli import main
from lightning_smddp.doctor import examination
from lightning_smddp.doctor.examination import as_text
from lightning_smddp.doctor.machine import Facts, Finding, find, look
from lightning_smddp.launchers.launch import Launch
from tests.devices import on_gpus
from tests.ranks import run_in_threads, run_trainer_ranks

HEALTHY = Facts(
    host="a",
    launch=Launch("torchrun", local_world_size=2),
    will_set={},
    versions={"lightning": "2.6.6", "torch": "2.13.0+cpu"},
    gpus=[],
    has_driver=False,
    interfaces=["lo"],
    shared_memory=(8 * 2**30, 7 * 2**30),
    processors=8,
    threads=4,
)
NOT_STARTED = Launch("torchrun", problems=("3 of 4 ranks. Start 4.",))


@pytest.mark.parametrize(
    ("changes", "level", "what", "cure"),
    [
        ({"launch": NOT_STARTED}, "error", "3 of 4 ranks", "Start 4"),
        ({"has_driver": True}, "warning", "sees no GPU", "nvidia-smi"),
        ({"gpus": ["H100"]}, "warning", "2 ranks of this node, but 1 GPU(s)", "all GPUs"),
        ({"shared_memory": (2**26, 2**26)}, "warning", "holds 64 MiB", "--shm-size"),
        ({"shared_memory": None}, "warning", "no /dev/shm", "tmpfs"),
        ({"processors": 4}, "warning", "2 ranks of 4 threads share 4 processors", "OMP_NUM_THREADS=2"),
    ],
)
def test_what_is_wrong_has_a_cure(changes: dict[str, Any], level: str, what: str, cure: str) -> None:
    facts = replace(HEALTHY, **changes)
    [finding] = find(facts)
    assert finding.level == level
    assert re.search(f"{re.escape(what)}.*{re.escape(cure)}", finding.text)
    assert f"{level.upper()} [a, b]: {finding.text}" in as_text(facts, "", {(finding, "b"), (finding, "a")})


def test_a_machine_without_linux_is_told_of_no_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert look({}).processors == os.cpu_count()
    [finding] = find(replace(HEALTHY, shared_memory=None))
    assert finding.text == "Shared memory needs Linux, this is darwin: ranks of a node average over sockets."


def test_nothing_is_wrong() -> None:
    assert find(HEALTHY) == []
    assert "Nothing wrong was found." in as_text(HEALTHY, "", set())


def test_looking_starts_nothing() -> None:
    facts = look({})
    assert facts.launch.launcher == "lightning"
    assert facts.versions["torch"].startswith("2.")
    assert facts.processors >= 1
    [finding] = find(look({"TORCHELASTIC_RUN_ID": "x", "RANK": "one"}))
    assert (finding.level, finding.text[:10]) == ("error", "RANK='one'")


def examined() -> tuple[int, str]:
    output = io.StringIO()
    with redirect_stdout(output):
        code = main(["doctor"])
    return code, output.getvalue()


def in_a_job() -> tuple[int, str]:
    """Rank 1 is on a machine with little shared memory."""
    if os.environ["RANK"] == "1":
        shutil.disk_usage = lambda _: SimpleNamespace(total=2**26, free=2**26)  # type: ignore[assignment]
    return examined()


@pytest.mark.slow
def test_the_ranks_of_a_job_are_examined_together() -> None:
    (code, text), (other, nothing) = run_trainer_ranks(in_a_job, 2, node_ids=["a", "b"])
    assert (code, other, nothing) == (0, 0, "")
    assert re.search(r"8 MiB, 2 ranks on 2 nodes, cpu: native .* ms, hierarchical .* ms, balanced .* ms\n", text)
    assert "/dev/shm holds 64 MiB" in text


def problems(group: dist.ProcessGroup) -> list[Finding]:
    _, findings = examination.measure(group, torch.device("cpu"))
    return findings


def test_seven_ranks_have_the_right_mean() -> None:
    """Algorithms that multiply by a seventh round; that is no other value."""
    assert run_in_threads(problems, 7) == [[]] * 7


def with_wrong_sums() -> tuple[int, str]:
    """Rank 1 gets other values."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if os.environ["RANK"] == "1":
            plain = examination.reduce_once
            monkeypatch.setattr(examination, "reduce_once", lambda algorithm, tensor: plain(algorithm, tensor) + 1)
        return examined()


@pytest.mark.slow
def test_other_values_are_an_error_on_all_ranks() -> None:
    (code, text), (other, nothing) = run_trainer_ranks(with_wrong_sums, 2)
    assert (code, other, nothing) == (1, 1, "")
    assert "ERROR [all hosts]: The all-reduce by native gave wrong numbers to 1 rank: [1]." in text


@pytest.mark.slow
@on_gpus(4)
def test_on_devices_the_ranks_of_two_nodes_measure(device: str) -> None:
    (code, text), *_ = run_trainer_ranks(examined, 4, node_ids=list("aabb"))
    assert code == 0
    assert "8 MiB, 4 ranks on 2 nodes, cuda: native " in text
    assert "wrong numbers" not in text


def test_ranks_that_cannot_meet_say_why() -> None:
    """On stdout there is one report, with errors alone on the others' stderr."""
    env = {"GLOO_SOCKET_IFNAME": "nonsense0"}
    (code, text), (other, nothing) = run_trainer_ranks(examined, 2, env=env)
    assert (code, other, nothing) == (1, 1, "")
    assert "gloo could not connect rank 0" in text
    assert "nonsense0" in text
    assert "all-reduce" not in text


def test_ranks_of_its_own_that_fail_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Process 1 failed:\n\nconnectFullMesh failed")

    monkeypatch.setattr(examination.mp, "start_processes", fail)
    code, text = examined()
    assert code == 1
    assert "do not come together: connectFullMesh failed" in text


@pytest.mark.slow
def test_alone_it_measures_with_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked here, as new interpreters take seconds; what they run and get is handed over in the same way."""
    start = examination.mp.start_processes
    monkeypatch.setattr(
        examination.mp,
        "start_processes",
        lambda *args, start_method, **options: start(*args, start_method="forkserver", **options),
    )
    code, text = examined()
    assert code == 0
    assert "8 MiB, 2 ranks on 1 node, cpu: native " in text
    assert len(text.splitlines()) < 25
    assert max(map(len, text.splitlines())) < 200
