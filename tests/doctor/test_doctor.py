"""``lightning-smddp doctor``: whatever is wrong is named with its cure, and the ranks of a job answer together."""

from __future__ import annotations

import copy
import functools
import io
import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch.distributed as dist

from lightning_smddp.cli import main
from lightning_smddp.doctor import examination
from lightning_smddp.doctor.examination import as_json, as_text
from lightning_smddp.doctor.facts import look
from lightning_smddp.doctor.findings import Finding, find, merged
from tests.devices import on_gpus
from tests.ranks import run_trainer_ranks

HEALTHY: dict[str, Any] = {
    "host": "a",
    "versions": {"lightning": "2.6.6", "pytorch-lightning": None, "torch": "2.13.0+cpu", "mpi4py": None},
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
    "sees_processes_end": True,
    "mpi_library": None,
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
        (changed("versions.lightning", None), "error", "Neither lightning nor", "pip install"),
        (changed("versions.lightning", "2.5.9"), "error", "older than", "'lightning>=2.6'"),
        (changed("versions.torch", "2.9.1+cu128"), "error", "torch is 2.9.1", "'torch>=2.11'"),
        (changed("versions.lightning", "2.6.3"), "error", "malicious upload", "credentials for stolen"),
        (changed("backends.gloo", False), "error", "without gloo", "wheel"),
        (changed("network.problems", ["GLOO_SOCKET_IFNAME=x: none."]), "error", "GLOO_SOCKET_IFNAME=x", "unset"),
        (changed("network.main_address", NOWHERE), "error", "b (MASTER_ADDR), is unknown here", "Set MASTER_ADDR"),
        (
            changed("network.main_address", LOOPBACK, **{"launch.num_nodes": 2}),
            "error", "own loopback", "Set MASTER_ADDR",
        ),
        (
            changed("network.own_name", LOOPBACK, **{"launch.num_nodes": 2}),
            "warning", "stands for its loopback", "GLOO_SOCKET_IFNAME",
        ),
        (
            changed("network.own_name", NOWHERE, **{"launch.num_nodes": 2}),
            "warning", "cannot resolve its own name", "GLOO_SOCKET_IFNAME",
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
        (changed("sees_processes_end", False), "warning", "no pidfds", "Linux 5.3"),
        (changed("versions.mpi4py", "4.1.0"), "warning", "no MPI library", "from mpi4py import MPI"),
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


def test_a_healthy_machine_has_no_findings() -> None:
    assert find(HEALTHY) == []
    assert "Nothing wrong was found." in as_text(HEALTHY, None, [])


def test_a_slow_link_is_named() -> None:
    links = [{"rank": i, "host": f"h{i}", "latency_us": 50, "gigabytes_per_s": 1.2} for i in range(1, 4)]
    measured = {"links": [*links, {"rank": 4, "host": "h4", "latency_us": 50, "gigabytes_per_s": 0.1}]}
    [finding] = find(HEALTHY, measured)
    assert (finding.level, "to h4 carries 0.10 GB/s" in finding.what) == ("warning", True)
    assert find(HEALTHY, {"links": links, "notes": []}) == []
    [finding] = find(HEALTHY, {"links": links, "notes": ["no shared memory: not Linux"]})
    assert finding.what == "No shared memory: not Linux."


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
    assert found["measured"]["world_size"] == 2
    assert found["measured"]["nodes"] == [[0], [1]]
    assert set(found["measured"]["all_reduce"]) == {"native", "hierarchical", "balanced"}
    assert all(seconds > 0 for times in found["measured"]["all_reduce"].values() for seconds in times)
    assert [link["rank"] for link in found["measured"]["links"]] == [1]
    assert any("500 files open" in finding["what"] for finding in found["findings"])


def with_wrong_messages() -> tuple[int, str]:
    """What rank 1 sends arrives with other values."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if os.environ["RANK"] == "1":
            plain = dist.send
            monkeypatch.setattr(dist, "send", lambda tensor, *args, **kwargs: plain(tensor + 1, *args, **kwargs))
        return examined()


@pytest.mark.slow
@on_gpus(2)
def test_a_path_that_brings_other_values_is_an_error(device: str) -> None:
    (code, text), (other, nothing) = run_trainer_ranks(with_wrong_messages, 2)
    assert (code, other, nothing) == (1, 1, "")
    assert "messages between neighbours: rank 0: 1000 of 1000 numbers arrived with other values" in text
    assert "ERROR: The self-test of messages between neighbours failed: rank 0: 1000 of" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [
        pytest.param("aaaa", {"node's ranks"}, marks=pytest.mark.exhaustive),
        ("aabb", {"node's ranks", "across nodes"}),
    ],
)
@on_gpus(4)
def test_on_devices_the_paths_of_training_are_tried(device: str, nodes: str, kinds: set[str]) -> None:
    (code, text), *_ = run_trainer_ranks(examined, 4, "--json", node_ids=list(nodes))
    measured = json.loads(text)["measured"]
    assert (code, measured["device"]) == (0, "cuda")
    assert all(problem is None for problem in measured["paths"].values())
    tried = " ".join(measured["paths"])
    assert all(kind in tried for kind in ("all-reduce", "messages between neighbours", *kinds))
    assert [link["ranks"] for link in measured["neighbours"]] == [[0, 1], [1, 2], [2, 3]]
    assert all(link["gigabytes_per_s"] > 0 for link in measured["neighbours"])


def test_a_slow_link_inside_a_node_is_named() -> None:
    links = [{"ranks": [i, i + 1], "latency_us": 9, "gigabytes_per_s": 2 if i == 2 else 150} for i in range(5)]
    [finding] = find(HEALTHY, {"neighbours": links, "nodes": [[0, 1, 2, 3, 4, 5]]})
    assert "between ranks 2 and 3 carries 2.00 GB/s, others of this node 150.00" in finding.what
    assert find(HEALTHY, {"neighbours": links, "nodes": [[0, 1, 2], [3, 4, 5]]}) == []


def test_ranks_that_cannot_meet_say_why() -> None:
    """On stdout there is one report, with errors alone on the others' stderr."""
    env = {"GLOO_SOCKET_IFNAME": "nonsense0"}
    (code, text), (other, nothing) = run_trainer_ranks(examined, 2, env=env)
    assert (code, other, nothing) == (1, 1, "")
    assert "nonsense0: this machine has no such interface" in text


def test_looking_alone_gives_one_report() -> None:
    (_, text), (_, nothing) = run_trainer_ranks(examined, 2, "--json", "--no-measure")
    assert json.loads(text)["measured"] is None
    assert nothing == ""


def test_errors_come_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    code, text = examined()
    assert (code, "measured" in text) == (1, False)
    assert "nonsense0: this machine has no such interface" in text


def test_ranks_of_its_own_that_fail_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("Process 1 failed:\n\nconnectFullMesh failed")

    monkeypatch.setattr(examination, "_measured_here", fail)
    code, text = examined()
    assert code == 1
    assert "do not come together: connectFullMesh failed" in text


@pytest.mark.slow
@pytest.mark.parametrize("show", [as_text, pytest.param(as_json, marks=pytest.mark.exhaustive)], ids=["text", "json"])
def test_alone_it_measures_with_ranks_of_its_own(show: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked here, as new interpreters take seconds; what they run and get is handed over in the same way."""
    spawn = examination.mp.start_processes
    forkserver = functools.partial(spawn, start_method="forkserver")
    if show is as_text:
        monkeypatch.setattr(
            examination.mp, "start_processes", lambda *args, start_method, **options: forkserver(*args, **options)
        )
    code, text = examined(*(["--json"] if show is as_json else []))
    assert code == 0
    assert "shared_memory" in text
    assert "all_reduce" in text if show is as_json else "link            to rank 1" in text
