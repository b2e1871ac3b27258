"""How a process is ended, and what a training thread that has an error of its own leaves behind in the interpreter."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from lightning_smddp.supervision.shutdown import Shutdown
from tests.programs import run_program

PROFILED = """
import cProfile
from lightning_smddp.supervision.shutdown import Shutdown

def function():
    return "profiled"

shutdown = Shutdown()
shutdown.take_over()
profile = cProfile.Profile()
profile.enable()
result = function()
profile.disable()
print(result, shutdown.is_handled)
"""


def test_taking_over_leaves_no_error_that_never_comes(tmp_path: Path) -> None:
    (tmp_path / "profiled.py").write_text(PROFILED)
    result = run_program(["profiled.py"], tmp_path, timeout=30)
    assert result.stdout == "profiled True\n", result.stderr


@pytest.fixture(params=[errno.EBADF, errno.EPIPE, errno.EAGAIN], ids=["closed", "nobody reads it", "full"])
def broken_stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a daemon, of a pipe whose reader has gone, and of one without room that does not block."""
    write = os.write

    def write_elsewhere(descriptor: int, data: bytes) -> int:
        if descriptor == 2:
            raise OSError(request.param, os.strerror(request.param))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_elsewhere)


@pytest.mark.usefixtures("broken_stderr")
@pytest.mark.parametrize("error", [None, ValueError("bad")])
def test_a_process_is_ended_where_nothing_can_be_said(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError came before ``os._exit``: the process went on, unwatched."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    shutdown = Shutdown()
    if error is not None:
        shutdown.take_over(error)
    shutdown.force(143, "rank 0", "it did not stop")
    assert codes == [143]


def test_clean_ups_run_before_a_forced_end_and_one_that_hangs_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    shutdown, cleaned, hung = Shutdown(), threading.Event(), threading.Event()
    shutdown.clean_ups += [hung.wait, cleaned.set]
    begin = time.monotonic()
    shutdown.force(1, "rank 1 (host a) at step 3 (backward)", "rank 0 died")
    assert cleaned.is_set()
    assert time.monotonic() - begin < 5.0
    hung.set()
    text = capfd.readouterr().err
    line = "lightning-smddp: rank 1 (host a) at step 3 (backward) is ended, exit code 1. Cause: rank 0 died\n"
    assert text.endswith(line)
    assert "test_clean_ups_run" in text  # where its threads are
