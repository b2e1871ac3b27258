"""Our strategies take the cluster environment that fits how they were started, in both of Lightning's packages."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

import lightning_smddp
from lightning_smddp import MPIRunEnvironment, SageMakerEnvironment, _registration
from lightning_smddp._compat import environments as _compat
from lightning_smddp.strategies import environments
from lightning_smddp.strategies.launchers import launcher_pid, may_be_ended
from tests.launchers.cases import enter

PACKAGES = ["lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"]
QUIET = {"accelerator": "cpu", "devices": 2, "num_nodes": 2}


@pytest.fixture(autouse=True)
def _rank_of_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lightning keeps the rank in one place for the whole process."""
    before = getattr(rank_zero_only, "rank", None)
    yield
    if before is None:
        vars(rank_zero_only).pop("rank", None)
    else:
        rank_zero_only.rank = before


def trainer(package: str, strategy: Any, **options: Any) -> Any:
    """A Trainer, or a Fabric, of ``package``."""
    module = importlib.import_module(package)
    if "fabric" in package:
        return module.Fabric(strategy=strategy, **{**QUIET, **options})
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return module.Trainer(strategy=strategy, **{**QUIET, **quiet, **options})


def environments_of(package: str) -> Any:
    fabric = "lightning.fabric" if package.startswith("lightning.") else "lightning_fabric"
    return importlib.import_module(f"{fabric}.plugins.environments")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("open_mpi_4_two_nodes", "MPIRunEnvironment"),
        ("open_mpi_in_slurm", "MPIRunEnvironment"),
        ("sagemaker_mpi", "SageMakerEnvironment"),
        ("sagemaker_torch_distributed", "SageMakerEnvironment"),
        ("sagemaker_none", "SageMakerEnvironment"),
        ("kubeflow", "PodEnvironment"),
        ("torchrun_in_slurm", "TorchElasticEnvironment"),
        ("slurm", "SLURMEnvironment"),
        ("slurm_allocation", "LightningEnvironment"),
        ("plain", "LightningEnvironment"),
    ],
)
def test_the_environment_is_chosen(package: str, case: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(case, monkeypatch)
    strategy = trainer(package, "smddp").strategy
    chosen = strategy.cluster_environment
    assert type(chosen).__name__ == expected
    assert isinstance(chosen, environments_of(package).ClusterEnvironment)
    launched = hasattr(chosen, "launch") and chosen.launch.starts_ranks
    if launched:
        assert (strategy.global_rank, strategy.world_size) == (chosen.launch.rank, chosen.launch.world_size)
        assert strategy.local_rank == chosen.launch.local_rank
        assert chosen.creates_processes_externally


def test_every_strategy_of_ours_chooses_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    enter("open_mpi_4", monkeypatch)

    class Own(lightning_smddp.SMDDPStrategy):
        pass

    for strategy in ("smddp_pipeline", "smddp_find_unused_parameters_true", lightning_smddp.SMDDPStrategy(), Own()):
        chosen = trainer("lightning.pytorch", strategy, num_nodes=1).strategy.cluster_environment
        assert isinstance(chosen, MPIRunEnvironment)
    others = trainer("lightning.pytorch", "ddp", num_nodes=1).strategy.cluster_environment
    assert type(others).__name__ == "LightningEnvironment"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_given_environment_wins(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enter("sagemaker_mpi", monkeypatch)
    given = environments_of(package).LightningEnvironment()
    assert trainer(package, "smddp", plugins=[given]).strategy.cluster_environment is given
    if package == "lightning.pytorch":
        strategy = lightning_smddp.SMDDPStrategy(cluster_environment=given)
        assert trainer(package, strategy).strategy.cluster_environment is given


def test_a_given_environment_is_not_judged_by_others_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the processes that Lightning starts, too, in a shell that Slurm has left its variables in."""
    enter("slurm_batch_without_srun", monkeypatch, LOCAL_RANK="1")
    with pytest.raises(ValueError, match="srun"):
        environments.before_start(Strategy(environments_of("lightning.pytorch").SLURMEnvironment()), verbose=True)
    with caplog.at_level(logging.INFO):
        environments.before_start(Strategy(environments_of("lightning.pytorch").LightningEnvironment()), verbose=True)
    assert "Started by" not in caplog.text


def test_our_environments_as_plugins_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, environment in (("sagemaker_mpi", SageMakerEnvironment), ("open_mpi_4_two_nodes", MPIRunEnvironment)):
        with monkeypatch.context() as patch:
            enter(case, patch)
            assert environment.detect()
            strategy = trainer("lightning.pytorch", "ddp", plugins=[environment()]).strategy
            assert isinstance(strategy.cluster_environment, environment)
            assert (strategy.global_rank, strategy.world_size, strategy.node_rank) == (3, 4, 1)


def test_mpirun_in_a_slurm_job_without_tasks_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own search ends with an error there."""
    enter("open_mpi_in_slurm", monkeypatch, SLURM_NTASKS_PER_NODE=None)
    assert trainer("lightning.pytorch", "smddp").strategy.world_size == 4
    with pytest.raises(RuntimeError, match="--ntasks=4"):
        trainer("lightning.pytorch", "ddp")


# ---- the environments themselves ----


def test_a_sagemaker_host_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a host, then one that Lightning has started beside it."""
    enter("sagemaker_none", monkeypatch)
    parent = trainer("lightning.pytorch", "smddp").strategy
    assert not parent.cluster_environment.creates_processes_externally
    assert (parent.global_rank, parent.world_size, parent.node_rank) == (2, 4, 1)  # the second host's first
    assert (parent.cluster_environment.main_address, parent.cluster_environment.main_port) == ("algo-1", 7777)
    for name, value in {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "algo-1"}.items():
        monkeypatch.setenv(name, value)
    child = trainer("lightning.pytorch", "smddp").strategy
    assert child.cluster_environment.creates_processes_externally
    assert (child.global_rank, child.local_rank, child.world_size) == (3, 1, 4)
    child.cluster_environment.teardown()
    assert "WORLD_SIZE" not in os.environ
    monkeypatch.setenv("WORLD_SIZE", "4")  # what monkeypatch expects to find


def test_a_job_of_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    enter("sagemaker_none", monkeypatch)
    with pytest.raises(ValueError, match="num_nodes=1. Set num_nodes=2"):
        SageMakerEnvironment().validate_settings(num_devices=2, num_nodes=1)


def test_ranks_of_mpirun_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher_pid() is None
    assert not may_be_ended()
    enter("mpich", monkeypatch)
    assert launcher_pid() == os.getppid()
    assert may_be_ended()


# ---- before the start ----


class Strategy:
    """As much of a strategy as ``before_start`` looks at."""

    def __init__(self, environment: Any) -> None:
        self.cluster_environment = environment


def test_what_was_read_is_said_and_the_network_prepared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enter("sagemaker_mpi_rank_0", monkeypatch, NCCL_SOCKET_IFNAME="lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # and as before at the end of the test
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with caplog.at_level(logging.INFO):
        environments.before_start(Strategy(SageMakerEnvironment()), verbose=True)
    lines = [record.getMessage() for record in caplog.records if "Started by" in record.getMessage()]
    assert len(lines) == 1
    assert "mpirun on SageMaker: rank 0 of 4" in lines[0]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"  # the user's own
    caplog.clear()
    with caplog.at_level(logging.INFO):
        environments.before_start(Strategy(SageMakerEnvironment()), verbose=False)
    assert "Started by" not in caplog.text


def test_an_interface_that_is_not_here_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    enter("sagemaker_local_mode", monkeypatch)
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    environments.before_start(Strategy(SageMakerEnvironment()), verbose=False)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before
    assert "NCCL_SOCKET_IFNAME" not in os.environ


# ---- changes to Lightning ----


@pytest.mark.parametrize("name", _registration._CONNECTORS)
def test_a_second_change_changes_nothing(name: str) -> None:
    module = importlib.import_module(name)
    classes = [getattr(module, c, None) for c in ("_AcceleratorConnector", "_Connector")]
    before = [dict(vars(cls)) for cls in classes if isinstance(cls, type)]
    _registration.install()
    _registration.change(module)
    assert [dict(vars(cls)) for cls in classes if isinstance(cls, type)] == before
    assert any(getattr(value, "__module__", "") == _compat.__name__ for found in before for value in found.values())
