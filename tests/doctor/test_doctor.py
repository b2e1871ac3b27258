"""``lightning-smddp doctor``: whatever is wrong is named with its cure, and the ranks of a job answer together."""

from __future__ import annotations

import copy
import io
import json
import os
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smddp.cli import main
from lightning_smddp.communication.errors import StartError
from lightning_smddp.doctor import examination
from lightning_smddp.doctor.examination import as_json, as_text
from lightning_smddp.doctor.facts import look
from lightning_smddp.doctor.findings import Finding, find, merged
from tests.devices import on_gpus
from tests.ranks import run_in_threads, run_trainer_ranks

HEALTHY: dict[str, Any] = {
    "host": "a",
    "versions": {"lightning": "2.6.6", "torch": "2.13.0+cpu"},
    "launch": {"problems": [], "num_nodes": 1, "local_world_size": 2, "sources": {}, "will_set": {}, "line": "!"},
    "launch_problem": None,
    "backends": {"gloo": True, "nccl": True},
    "accelerators": {"gpus": [], "torch_cuda": None, "nvidia_driver": False},
    "network": {
        "interfaces": {"lo": ["127.0.0.1"]}, "problems": [], "main_address": None, "rdma_devices": [],
        "own_name": {"name": "a", "addresses": ["10.0.0.1"], "error": None}, "gloo_interface": None,
    },
    "shared_memory": {"size": 8 * 2**30, "free": 7 * 2**30},
    "processors": {"usable": 8, "threads_of_a_rank": 4},
    "open_files": 65536,
}  # fmt: skip
NOWHERE = {"name": "b", "addresses": [], "error": "Name or service not known"}
LOOPBACK = {"name": "b", "addresses": ["127.0.1.1"], "error": None}


def changed(path: str, value: Any, **more: Any) -> dict[str, Any]:
    facts = copy.deepcopy(HEALTHY)
    for name, new in {path: value, **more}.items():
        *parents, last = name.split(".")
        place = facts
        for parent in parents:
            place = place[parent]
        place[last] = new
    return facts


@pytest.mark.parametrize(
    ("facts", "level", "what", "cure"),
    [
        (changed("launch_problem", "RANK='x' is not a number."), "error", "RANK='x'", "launchers.md"),
        (changed("launch.problems", [("3 of 4 ranks.", "Start 4.")]), "error", "3 of 4 ranks", "Start 4"),
        (changed("network.problems", ["GLOO_SOCKET_IFNAME=x: none."]), "error", "GLOO_SOCKET_IFNAME=x", "unset"),
        (changed("network.main_address", NOWHERE), "error", "b (MASTER_ADDR), is unknown here", "Set MASTER_ADDR"),
        (
            changed("network.main_address", LOOPBACK, **{"launch.num_nodes": 2}),
            "error", "own loopback", "Set MASTER_ADDR",
        ),
        (
            changed("network.own_name", LOOPBACK, **{"launch.num_nodes": 2}),
            "warning", "finds its interface, is this machine's own loopback", "GLOO_SOCKET_IFNAME",
        ),
        (
            changed("network.own_name", NOWHERE, **{"launch.num_nodes": 2}),
            "warning", "finds its interface, is unknown here", "GLOO_SOCKET_IFNAME",
        ),
        (changed("accelerators.nvidia_driver", True), "warning", "a build without CUDA", "pytorch.org"),
        (
            changed("accelerators", {"gpus": [], "torch_cuda": "12.8", "nvidia_driver": True}),
            "warning", "sees no GPU", "nvidia-smi",
        ),
        (
            changed(
                "accelerators", {"gpus": ["H100"] * 2, "torch_cuda": "12.8", "nvidia_driver": True},
                **{"backends.nccl": False},
            ),
            "warning", "without NCCL", "wheel",
        ),
        (
            changed("accelerators", {"gpus": ["H100"], "torch_cuda": "12.8", "nvidia_driver": True}),
            "warning", "2 ranks of this node, but 1 GPU(s)", "all GPUs",
        ),
        (changed("shared_memory", {"size": 2**26, "free": 2**26}), "warning", "holds 64 MiB", "--shm-size"),
        (changed("shared_memory", {"size": 2**33, "free": 2**20}), "warning", "is full: 1 of 8192", "Remove"),
        (changed("shared_memory", None), "warning", "no /dev/shm", "tmpfs"),
        (changed("processors.usable", 4), "warning", "2 ranks of 4 threads share 4 processors", "OMP_NUM_THREADS=2"),
        (changed("open_files", 256), "warning", "256 files", "ulimit"),
        (
            changed("launch.will_set", {"FI_PROVIDER": "efa"}, **{"launch.instance_type": "ml.p4d.24xlarge"}),
            "warning", "ml.p4d.24xlarge, but no EFA device", "security group",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_has_a_cure(facts: dict[str, Any], level: str, what: str, cure: str) -> None:
    [finding] = find(facts)
    assert finding.level == level
    assert what in finding.what
    assert cure in finding.cure
    assert finding.what in as_text(facts, None, [finding])


def test_what_was_measured_is_judged() -> None:
    assert find(HEALTHY) == []
    assert "Nothing wrong was found." in as_text(HEALTHY, None, [])
    measured = {"problems": {"native": "rank 1: 3 of 1000 numbers arrived with other values"}, "notes": []}
    [finding] = find(HEALTHY, measured)
    assert finding.level == "error"
    assert finding.what == "The all-reduce by native failed: rank 1: 3 of 1000 numbers arrived with other values."
    [finding] = find(HEALTHY, {"problems": {}, "notes": ["no shared memory: not Linux"]})
    assert (finding.level, finding.what) == ("warning", "No shared memory: not Linux.")


def test_findings_of_several_hosts_are_one() -> None:
    both = [
        Finding("warning", "w", "c", ("a",)),
        Finding("error", "e", "c", ("b",)),
        Finding("warning", "w", "c", ("b",)),
    ]
    assert merged(both) == [Finding("error", "e", "c", ("b",)), Finding("warning", "w", "c", ("a", "b"))]


def test_looking_starts_nothing_and_is_json() -> None:
    facts = look({})
    assert json.loads(as_json(facts, None, []))["facts"] == json.loads(json.dumps(facts))
    assert facts["launch"]["launcher"] == "lightning"
    assert facts["versions"]["torch"].startswith("2.")
    assert facts["processors"]["usable"] >= 1
    assert look({"TORCHELASTIC_RUN_ID": "x", "RANK": "one"})["launch_problem"].startswith("RANK='one'")


def test_ranks_with_fabric_alone_say_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = []

    def join(card: Any, *_: Any) -> None:
        cards.append(card)
        raise StartError("enough")

    monkeypatch.setattr(examination, "join", join)
    launch = {"rank": 0, "local_rank": 0, "world_size": 2, "main_address": "a", "main_port": 1, "local_world_size": 2}
    facts = changed(
        "versions", {"torch": "2.13.0", "lightning-fabric": "2.6.6"}, launch={**HEALTHY["launch"], **launch}
    )
    with pytest.raises(StartError, match="enough"):
        examination._as_a_rank(facts)
    assert cards[0].versions["lightning"] == "2.6.6"


def examined(*arguments: str) -> tuple[int, str]:
    output = io.StringIO()
    with redirect_stdout(output):
        code = main(["doctor", *arguments])
    return code, output.getvalue()


def in_a_job(shortage: bool) -> tuple[int, str]:
    """Rank 1 is on a machine with too few files, or with a wrong interface."""
    if shortage and os.environ["RANK"] == "1":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    return examined("--json")


@pytest.mark.slow
def test_the_ranks_of_a_job_are_examined_together() -> None:
    (code, text), (other, nothing) = run_trainer_ranks(in_a_job, 2, True, node_ids=["a", "b"])
    assert (code, other, nothing) == (0, 0, "")
    found = json.loads(text)
    assert found["measured"]["nodes"] == [[0], [1]]
    assert set(found["measured"]["all_reduce"]) == {"native", "hierarchical", "balanced"}
    assert all(seconds > 0 for seconds in found["measured"]["all_reduce"].values())
    assert any("500 files open" in finding["what"] for finding in found["findings"])


def problems(group: dist.ProcessGroup) -> dict[str, str]:
    return examination.measure(group, torch.device("cpu"))["problems"]  # type: ignore[no-any-return]


def test_seven_ranks_have_the_right_mean() -> None:
    """Algorithms that multiply by a seventh round; that is no other value."""
    assert run_in_threads(problems, 7) == [{}] * 7


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
    assert "ERROR: The all-reduce by native failed: rank 1: 1000 of 1000 numbers arrived with other values" in text


@pytest.mark.slow
@on_gpus(4)
def test_on_devices_the_ranks_of_two_nodes_measure(device: str) -> None:
    (code, text), *_ = run_trainer_ranks(examined, 4, "--json", node_ids=list("aabb"))
    measured = json.loads(text)["measured"]
    assert (code, measured["device"], measured["problems"]) == (0, "cuda", {})
    assert all(seconds > 0 for seconds in measured["all_reduce"].values())


def test_ranks_that_cannot_meet_say_why() -> None:
    """On stdout there is one report, with errors alone on the others' stderr."""
    env = {"GLOO_SOCKET_IFNAME": "nonsense0"}
    (code, text), (other, nothing) = run_trainer_ranks(examined, 2, env=env)
    assert (code, other, nothing) == (1, 1, "")
    assert "nonsense0: this machine has no such interface" in text
    assert "measured" not in text  # errors come before measuring


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
