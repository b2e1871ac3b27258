"""Who started a process is read from its variables and SageMaker's files, in the documented order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_smddp.launchers.detection import detect
from lightning_smddp.launchers.mpi import first_host
from lightning_smddp.launchers.sagemaker import network_variables
from tests.launchers.cases import NAMES, detected, environ

ONE = (1, 1, 2, 2, 0, 1)  # rank, local rank, world size, local world size, node rank, nodes
LAST = (3, 1, 4, 2, 1, 2)
THIRD = (2, 0, 4, 2, 1, 2)
NODE_1 = (None, None, None, None, 1, 2)
NOTHING = (None,) * 6

# case -> launcher, ranks, address and port where the ranks meet
EXPECTED: dict[str, tuple[str, tuple[int | None, ...], tuple[str | None, int | None]]] = {
    "torchrun": ("torchrun", ONE, ("localhost", 39501)),
    "torchrun_in_slurm": ("torchrun", LAST, ("gpu03", 29500)),
    "jsrun": ("jsrun", (3, 1, 4, None, None, None), (None, None)),
    "open_mpi_4": ("mpirun", ONE, ("127.0.0.1", 20794)),
    "open_mpi_4_two_nodes": ("mpirun", LAST, (None, 17936)),
    "open_mpi_5": ("mpirun", ONE, ("127.0.0.1", 17040)),
    "open_mpi_1_rank": ("mpirun", (0, 0, 1, 1, 0, 1), ("127.0.0.1", 20794)),
    "open_mpi_in_slurm": ("mpirun", LAST, (None, 17936)),
    "mpich": ("mpirun", ONE, ("127.0.0.1", 29500)),
    "mpich_two_nodes": ("mpirun", THIRD, (None, 29500)),
    "mpich_in_slurm": ("mpirun", THIRD, (None, 24157)),
    "intel_mpi": ("mpirun", ONE, ("127.0.0.1", 29500)),
    "slurm": ("srun", LAST, ("gpu03", 16234)),
    "slurm_pmi2": ("srun", LAST, ("gpu03", 16234)),
    "slurm_pmix": ("srun", LAST, ("gpu03", 16234)),
    "slurm_batch_without_srun": ("srun", (0, 0, 4, 2, 0, 2), ("gpu03", 16234)),
    "slurm_interactive": ("lightning", NOTHING, (None, None)),
    "slurm_allocation": ("lightning", NOTHING, (None, None)),
    "kubeflow": ("kubeflow", (2, 0, 3, 1, 2, 3), ("mnist-master-0", 23456)),
    "lightning_child": ("lightning", (None, 1, None, None, 0, None), ("127.0.0.1", 43211)),
    "plain": ("lightning", NOTHING, (None, None)),
    "sagemaker_none": ("lightning", NODE_1, ("algo-1", 7777)),
    "sagemaker_none_ten_hosts": ("lightning", (None, None, None, None, 1, 10), ("algo-1", 7777)),
    "sagemaker_parameter_server": ("lightning", (None, None, None, None, 0, 2), ("algo-2", 7777)),
    "sagemaker_mpi": ("mpirun", LAST, ("algo-2", 7777)),
    "sagemaker_mpi_bare": ("mpirun", THIRD, ("algo-2", 7777)),
    "sagemaker_mpi_rank_0": ("mpirun", (0, 0, 4, 2, 0, 2), ("algo-2", 7777)),
    "sagemaker_smp_v1": ("mpirun", THIRD, ("algo-2", 7777)),
    "sagemaker_smddp": ("mpirun", LAST, ("algo-2", 7777)),
    "sagemaker_smddprun": ("mpirun", LAST, ("algo-2", 7777)),
    "sagemaker_pytorchddp": ("mpirun", LAST, ("algo-2", 7777)),
    "sagemaker_torch_distributed": ("torchrun", (1, 1, 4, 2, 0, 2), ("algo-2", 7777)),
    "sagemaker_smp_v2": ("torchrun", (1, 1, 4, 2, 0, 2), ("algo-2", 7777)),
    "sagemaker_local_mode": ("lightning", NODE_1, ("algo-1-abcde", 7777)),
    "sagemaker_heterogeneous": ("mpirun", THIRD, ("algo-4", 7777)),
    "sagemaker_heterogeneous_outside": ("lightning", NOTHING, ("algo-4", 7777)),
    "sdk3_none": ("lightning", NODE_1, ("algo-1", 7777)),
    "sdk3_torchrun": ("torchrun", LAST, ("algo-1", 7777)),
    "sdk3_mpi": ("mpirun", LAST, ("algo-1", 7777)),
    "sdk3_mpi_np_bug": ("mpirun", ONE, ("algo-1", 7777)),
}
PROBLEMS = {
    "open_mpi_4_two_nodes": "nothing says where rank 0 is.*-x MASTER_ADDR=host0",
    "open_mpi_in_slurm": "nothing says where rank 0 is.*-x MASTER_ADDR=host0",
    "mpich_in_slurm": "nothing says where rank 0 is.*-genv MASTER_ADDR host0",
    "mpich_two_nodes": "nothing says where rank 0 is.*-genv MASTER_ADDR host0",
    "slurm_batch_without_srun": "SLURM_NTASKS=4 .* not started by srun.*Write srun before python",
    "sagemaker_heterogeneous_outside": "Host algo-1 is in none of the instance groups that train \\(algo-4, algo-3\\)",
}


def test_every_fixture_has_an_expectation() -> None:
    assert sorted(EXPECTED) == NAMES


@pytest.mark.parametrize("case", NAMES)
def test_what_is_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ("sagemaker_smddprun").items():  # which mean nothing where others are given
        if name not in ("PATH", "HOME", "PWD"):
            monkeypatch.setenv(name, value)
    launch = detected(case)
    launcher, ranks, meeting = EXPECTED[case]
    assert launch.launcher == launcher
    found = (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size)
    assert (*found, launch.node_rank, launch.num_nodes) == ranks
    assert (launch.main_address, launch.main_port) == meeting
    if case in PROBLEMS:
        with pytest.raises(ValueError, match=PROBLEMS[case]):
            launch.check(2, 2)
    else:
        assert launch.problems == ()
    assert bool(launch.platform) == (case.startswith("sagemaker") or case.startswith("sdk3"))


def test_the_description_is_one_line() -> None:
    assert detected("sagemaker_mpi").describe() == (
        "Started by mpirun on SageMaker: rank 3 of 4; local rank 1 of 2; node 1 of 2; rank 0 at algo-2 port 7777; "
        "interface eth0."
    )
    assert detected("plain").describe() == "Started by nobody, so Lightning starts the ranks of a node."


# ---- what was given is kept ----


@pytest.mark.parametrize("case", ["open_mpi_4_two_nodes", "open_mpi_5", "mpich_two_nodes", "sagemaker_mpi", "sdk3_mpi"])
def test_a_given_address_is_kept(case: str) -> None:
    launch = detected(case, MASTER_ADDR="algo-1", MASTER_PORT="1234")
    assert (launch.main_address, launch.main_port) == ("algo-1", 1234)
    assert launch.problems == ()


def test_all_ranks_of_an_mpirun_find_one_port() -> None:
    """The same on each rank, another one in each job."""
    job = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-gpu-03-13689@1"}
    first = detected("open_mpi_5", **job, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0")
    last = detected("open_mpi_5", **job, OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="1")
    assert first.main_port == last.main_port
    assert detected("open_mpi_5", **{**job, "PMIX_NAMESPACE": "prterun-gpu-03-13690@1"}).main_port != first.main_port
    assert 15000 <= (first.main_port or 0) < 25000


def test_an_mpi_that_places_ranks_by_node() -> None:
    by_node = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    launch = detected("open_mpi_4", **by_node, OMPI_COMM_WORLD_LOCAL_RANK="1")  # ranks 1, 3, 5, 7 are on this node
    assert (launch.node_rank, launch.num_nodes) == (1, 2)
    assert detected("open_mpi_4", **by_node, OMPI_COMM_WORLD_LOCAL_RANK="3").node_rank == 0  # ranks 0 to 3 are


def test_nodes_with_other_numbers_of_ranks() -> None:
    launch = detected("open_mpi_4", OMPI_COMM_WORLD_SIZE="5")
    with pytest.raises(ValueError, match="5 ranks, 2 of them on this node.*ppr:N:node"):
        launch.check(2, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,09],cpu1", "gpu03"), ("gpu7", "gpu7"), ("a,b", "a"), ("rack[1-2]n[07-09]", "rack1n07"),
    ],
)  # fmt: skip
def test_slurm_lists_of_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_pod_with_other_plans() -> None:
    assert detected("kubeflow", WORLD_SIZE="1").launcher == "lightning"
    assert detected("kubeflow", NODE_RANK="2").launcher == "lightning"
    assert detected("kubeflow", LOCAL_RANK="0").launcher == "lightning"
    assert detected("kubeflow", TORCHELASTIC_RUN_ID="1", LOCAL_RANK="0").launcher == "torchrun"


# ---- SageMaker's hosts ----


def test_node_0_is_the_master_in_every_order() -> None:
    """No launcher: sorted hosts, as the container sets MASTER_ADDR; a launcher: the groups' order, on every host."""
    assert detected("sagemaker_none").hosts == ("algo-1", "algo-2")
    assert detected("sagemaker_mpi").hosts == ("algo-2", "algo-1")
    moved = detected("sagemaker_none", MASTER_ADDR="algo-2")
    assert (moved.hosts, moved.node_rank) == (("algo-2", "algo-1"), 0)
    hosts = detected("sagemaker_none_ten_hosts").hosts
    assert hosts[:3] == ("algo-1", "algo-10", "algo-2")  # lexicographic


@pytest.mark.parametrize("case", ["sagemaker_none", "sagemaker_mpi", "sagemaker_heterogeneous", "sdk3_mpi"])
def test_all_hosts_agree(case: str, tmp_path: Path) -> None:
    launch = detected(case)
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    for source in (Path(__file__).parent / "fixtures" / case / "opt_ml" / "input" / "config").iterdir():
        (config / source.name).write_text(source.read_text())
    for index, host in enumerate(launch.hosts):
        resources = json.loads((config / "resourceconfig.json").read_text())
        (config / "resourceconfig.json").write_text(json.dumps({**resources, "current_host": host}))
        other = detect({**environ(case), "SAGEMAKER_BASE_DIR": str(tmp_path)})
        assert (other.hosts, other.main_address, other.problems) == (launch.hosts, launch.main_address, ())
        if launch.launcher == "lightning":
            assert other.node_rank == index


def test_an_mpi_that_has_not_reached_all_hosts() -> None:
    """SDK 3 gives mpirun the number of ranks of one host as that of the job."""
    with pytest.raises(ValueError, match="mpirun started 2 ranks.* ask for 4"):
        detected("sdk3_mpi_np_bug").check(2, 2)


def test_files_are_not_needed_where_variables_are() -> None:
    nowhere = {"SAGEMAKER_BASE_DIR": "/nowhere"}
    assert detect({**environ("sagemaker_none"), **nowhere}).hosts == ("algo-1", "algo-2")
    assert detect(nowhere).platform == ""


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text("{")
    with pytest.raises(ValueError, match="resourceconfig.json is not valid JSON"):
        detect({"SAGEMAKER_BASE_DIR": str(tmp_path)})


# ---- the world size, and the network ----


@pytest.mark.parametrize("case", [name for name in NAMES if EXPECTED[name][1][2] == 4 and name not in PROBLEMS])
def test_the_world_size_has_to_be_what_was_asked_for(case: str) -> None:
    launch = detected(case)
    launch.check(num_devices=2, num_nodes=2)
    with pytest.raises(ValueError, match=f"{launch.launcher} started 4 ranks.*devices=2 ask for 2. Set num_nodes="):
        launch.check(num_devices=2, num_nodes=1)
    if launch.local_world_size is not None:
        with pytest.raises(ValueError, match="2 of them on this node, .*Set num_nodes=2 and devices=2"):
            launch.check(num_devices=4, num_nodes=1)


def test_sagemakers_hosts_have_to_be_nodes() -> None:
    detected("sagemaker_none").check(8, 2)
    with pytest.raises(ValueError, match="2 nodes .algo-1, algo-2., but num_nodes=1. Set num_nodes=2"):
        detected("sagemaker_none").check(8, 1)


def test_network_variables() -> None:
    expected = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert network_variables(detected("sagemaker_mpi")) == expected
    assert network_variables(detected("slurm")) == {}
