"""A rank, or what started it, ends or falls silent. Pairs of strategy, launcher, kind and phase, not all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults import memory
from tests.faults.case import Case, exhaustive
from tests.faults.checks import assert_ended, assert_named
from tests.faults.injection import MESSAGE, Fault
from tests.faults.jobs import run

VALIDATES = {"limit_val_batches": 2, "val_check_interval": 3}
PP = "smddp_pipeline"
# How a process ended is known until its launcher has waited for it.
SIGKILL, EXIT, SIGSEGV = (
    f"(?:its process ended|{how})" for how in ("killed by SIGKILL", "exited with code 0", "killed by SIGSEGV")
)
IN_STEP = ["forward", "backward", "optimizer", "data"]


def death(rank: int, kind: str, phase: str, cause: str, step: int = 5, everyday: bool = False, **case: Any) -> Any:
    strategy, launcher = case.get("strategy", "smddp"), case.get("launcher", "script")
    name = f"{kind}-{rank}-{phase}-{strategy}-{launcher}{''.join(f'-{key}' for key in case if key not in _IN_NAME)}"
    marks = [] if everyday else [pytest.mark.slow]
    return pytest.param(rank, cause, Case([Fault(rank, step, kind, phase)], **case), id=name, marks=marks)


_IN_NAME = ("strategy", "launcher", "trainer")


@pytest.mark.parametrize(
    ("rank", "cause", "case"),
    [
        death(0, "kill", "comm", SIGKILL, everyday=True),
        death(0, "kill", "data", SIGKILL, strategy=PP, asleep={1: 12.0}),
        death(1, "kill", "setup", SIGKILL, step=0),
        death(0, "exit", "validation", EXIT, strategy=PP, launcher="spawn", trainer=VALIDATES),
        death(1, "raise", "comm", MESSAGE, workers=2, strategy=PP, launcher="torchrun"),
        death(1, "raise", "forward", MESSAGE, save_every=3, saves_on_exception=True),
        death(0, "raise", "forward", MESSAGE, strategy=PP, save_every=3, saves_on_exception=True),
        *exhaustive(
            death(1, "raise", "backward", MESSAGE),
            death(0, "kill", "forward", SIGKILL, workers=2),
            death(1, "kill", "forward", SIGKILL, strategy=PP, world_size=3),
            death(1, "kill", "data", SIGKILL, launcher="torchrun", asleep={0: 30.0}),
            death(0, "segv", "forward", SIGSEGV),
            death(1, "kill", "forward", SIGKILL, strategy=PP, launcher="spawn", workers=2),
            death(0, "sysexit", "optimizer", r"sys.exit\(0\)", launcher="torchrun"),
            death(1, "kill", "comm", SIGKILL, world_size=3),
            death(0, "kill", "comm", SIGKILL, launcher="spawn"),
            death(1, "kill", "comm", SIGKILL, strategy=PP),
            death(0, "raise", "backward", MESSAGE, strategy=PP),
            death(0, "kill", "optimizer", SIGKILL, strategy=PP, launcher="torchrun"),
            death(1, "kill", "data", SIGKILL, asleep={0: 30.0}, deeply=True),
            death(0, "kill", "setup", SIGKILL, step=0, strategy=PP),
            death(1, "exit", "optimizer", EXIT),
            death(1, "sysexit", "forward", r"sys.exit\(0\)", strategy=PP),
            death(1, "sysexit", "validation", r"sys.exit\(0\)", launcher="spawn", trainer=VALIDATES),
            death(1, "raise", "validation", MESSAGE, launcher="torchrun", trainer=VALIDATES),
            death(0, "raise", "optimizer", MESSAGE, strategy=PP, launcher="spawn"),
            death(0, "raise", "setup", MESSAGE, step=0),
            death(1, "oom", "backward", "MemoryError: cannot allocate 7 GiB", launcher="spawn"),
        ),
    ],
)
def test_of_a_rank(rank: int, cause: str, case: Case, tmp_path: Path) -> None:
    result = run(case, tmp_path)
    assert_ended(result)
    phase = case.faults[0].phase
    step = {"setup": -1, "data": 4}.get(phase)
    assert_named(result, rank, cause, [phase] if phase in ("setup", "validation") else IN_STEP, step=step)
    if case.faults[0].kind == "raise" and case.launcher != "spawn":
        assert result.errors[rank].endswith(f"ZeroDivisionError: {MESSAGE}"), result.describe()


def silence(rank: int, kind: str, phase: str, **case: Any) -> Any:
    name = f"{kind}-{rank}-{case.get('strategy', 'smddp')}-{case.get('launcher', 'script')}"
    timeout = 60.0 if kind == "stop" else 3.0  # a process that is stopped is seen whatever the timeouts
    return pytest.param(Case([Fault(rank, 5, kind, phase)], timeout=timeout, **case), id=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        silence(0, "stop", "comm"),
        silence(1, "hang", "forward", strategy=PP),
        *exhaustive(
            silence(1, "stop", "forward", strategy=PP, launcher="spawn"),
            silence(0, "stop", "forward", launcher="torchrun"),
            silence(0, "hang", "forward"),
        ),
    ],
)
def test_silence(case: Case, tmp_path: Path) -> None:
    result = run(case, tmp_path)
    assert_ended(result)
    assert_named(result, case.faults[0].rank, "", IN_STEP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "launcher", "ignores_sigint"),
    [
        (PP, "spawn", True),
        pytest.param("smddp", "torchrun", False, marks=pytest.mark.exhaustive),
        pytest.param(PP, "spawn", False, marks=pytest.mark.exhaustive),
        pytest.param("smddp", "spawn", True, marks=pytest.mark.exhaustive),
    ],
)
def test_of_the_launcher(strategy: str, launcher: str, ignores_sigint: bool, tmp_path: Path) -> None:
    case = Case([Fault(1, 5, "launcher", "forward")], strategy, launcher, ignores_sigint=ignores_sigint)
    result = run(case, tmp_path)
    assert_ended(result, code=-9)
    for rank in range(2):
        assert re.search(r"[Rr]ank \d .* launcher|launcher .* ended", result.said_by(rank)), result.describe()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["smddp", pytest.param(PP, marks=pytest.mark.exhaustive)])
def test_by_the_kernel_for_lack_of_memory(strategy: str, tmp_path: Path) -> None:
    if reason := memory.no_cgroups():
        pytest.skip(f"memory cgroups are not permitted here: {reason}")
    result = run(Case([Fault(1, 5, "oom_kill", "forward")], strategy), tmp_path)
    assert_ended(result)
    assert_named(result, 1, r"killed by SIGKILL, which the kernel sends, too, for lack of memory \(OOM\)", IN_STEP)


@pytest.mark.exhaustive
def test_with_new_interpreters(tmp_path: Path) -> None:
    result = run(Case([Fault(1, 5, "kill", "comm")], launcher="spawn", real=True), tmp_path)
    assert_ended(result, bound_s=30.0)  # on a busy machine an interpreter that has torch takes seconds to end
    assert_named(result, 1, SIGKILL, IN_STEP)
