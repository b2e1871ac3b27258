"""How a process is ended, and what a training thread that has an error of its own leaves behind in the interpreter."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import cast

import pytest
from torch.distributed import Store

from lightning_smddp.supervision.shutdown import Shutdown
from lightning_smddp.supervision.watch import Watch, WatchOptions
from tests.programs import run_program

PROFILED = """
import cProfile
from lightning_smddp.supervision.shutdown import Shutdown

def function():
    return "profiled"

ending = Shutdown(None, lambda: "here", lambda: False)
ending.take_over()
profile = cProfile.Profile()
profile.enable()
result = function()
profile.disable()
print(result, ending.is_handled)
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
    shutdown = Shutdown(None, lambda: "here", lambda: False)  # type: ignore[arg-type]
    shutdown.error = error
    shutdown.force(143, "it did not stop")
    assert codes == [143]


@pytest.mark.usefixtures("broken_stderr")
def test_a_stop_is_asked_for_where_nothing_can_be_said() -> None:
    """The notice of it ended the thread that watches, in rank 0."""
    watch = Watch(cast(Store, None), WatchOptions(0, 1, 10.0))
    watch._stop_asked(signal.SIGTERM)
    assert watch.stop_signal == signal.SIGTERM
    watch._let_go()
