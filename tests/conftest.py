from __future__ import annotations

import functools
import gc
import multiprocessing.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from tests import uncollected  # noqa: F401  until all tests are collected

# Before torch is imported, here and in the fork server that inherits this environment: one thread per rank,
# and gloo on the loopback interface, whatever the host name resolves to.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each interpreter that a test starts compiles the package anew
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
import torch

from tests import devices, rank_processes, simulated_cuda
from tests.leaks import Snapshot, adopt_orphans, name_semaphores
from tests.simulated_cuda import build

# Side by side (pytest-xdist) nobody knows which test a name in /dev/shm is from: they are looked at in the end.
SIDE_BY_SIDE = "PYTEST_XDIST_WORKER" in os.environ
BEFORE = pytest.StashKey[Snapshot]()
LAST_PATIENCE_S = 15.0
# The longest files first: handed out later, one would keep one worker alone busy. Those that wait for faults to be
# found stand among those that compute: three that wait leave the processors idle.
LONGEST = [
    "tests/test_examples.py",
    "tests/supervision/test_life.py",
    "tests/test_notebook.py",
    "tests/sharding/test_numbers.py",
    "tests/strategies/test_contract.py",
    "tests/supervision/test_failures.py",
    "tests/strategies/test_launchers.py",
    "tests/strategies/test_exact_resume.py",
    "tests/communication/test_join.py",
    "tests/sharding/test_checkpoints.py",
    "tests/faults/test_deaths.py",
    "tests/sharding/test_one_word.py",
    "tests/sharding/test_deepspeed.py",
    "tests/supervision/test_shutdown.py",
    "tests/strategies/test_pipeline_features.py",
    "tests/strategies/test_diloco.py",
    "tests/strategies/test_transparency.py",
    "tests/faults/test_nodes.py",
    "tests/gpu/test_data_parallel.py",
    "tests/strategies/test_layouts.py",
    "tests/faults/test_stops.py",
    "tests/gpu/test_pipelines.py",
    "tests/strategies/test_pipeline_schedules.py",
    "tests/supervision/test_stops.py",
    "tests/gpu/test_sharded_optimizer.py",
    "tests/strategies/test_pipeline_steps.py",
    "tests/strategies/test_device_faults.py",
    "tests/faults/test_data_and_files.py",
    "tests/multinode/test_torchrun.py",
    "tests/sagemaker/test_folders.py",
    "tests/test_readme.py",
    "tests/strategies/test_pipeline_hooks.py",
    "tests/strategies/test_pipeline_memory.py",
]


def pytest_configure(config: pytest.Config) -> None:
    adopt_orphans()
    name_semaphores()
    multiprocessing.util.get_temp_dir()  # of all processes: that of a test may be too long for the name of a socket
    config.stash[BEFORE] = Snapshot.take()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Shared memory that tests side by side have left fails the session."""
    if SIDE_BY_SIDE or not session.config.getoption("numprocesses", None):
        return
    deadline = time.monotonic() + LAST_PATIENCE_S  # the workers' own helpers end, and clear up, behind them
    while (left := session.config.stash[BEFORE].new_shared_memory()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        print(f"\nleaked: {sorted(left)} in /dev/shm; `make test JOBS=0` tells by which test")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: to look at it again takes each collection of garbage half a second."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the others stay in their order."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@functools.cache
def _no_network_namespaces() -> str | None:
    """Why network namespaces cannot be made here, or None."""
    command = ["unshare", "--net", "--mount", "ip", "link", "set", "lo", "up"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if result.returncode == 0 else result.stderr.strip()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test's time starts: build the simulated device, let the fork server import."""
    if session.config.option.collectonly:
        return
    if any(item.get_closest_marker("simulated_cuda") for item in session.items) and build.problem() is None:
        build.build()
    if any(item.get_closest_marker("slow") or item.get_closest_marker("exhaustive") for item in session.items):
        rank_processes.PRELOAD += rank_processes.PRELOAD_FOR_SLOW
        rank_processes.warm_up()


@pytest.fixture(autouse=True)
def _devices(no_leaks: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("simulated_cuda"):
        monkeypatch.setenv(simulated_cuda.VARIABLE, str(build.library()))
    if request.node.get_closest_marker("gpus"):
        monkeypatch.setenv(devices.GPUS, "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("gpus"):
        (needed,) = mark.args
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA devices, found {torch.cuda.device_count()}")
    if item.get_closest_marker("simulated_cuda") and (reason := build.problem()):
        pytest.skip(reason)
    if item.get_closest_marker("multinode") and (reason := _no_network_namespaces()):
        pytest.skip(f"network namespaces are not permitted here: {reason}")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves behind what ``tests/leaks.py`` knows about."""
    before = Snapshot.take()
    yield
    if found := before.leaks(memory=not SIDE_BY_SIDE):
        pytest.fail("the test leaked:\n  " + "\n  ".join(found), pytrace=False)
