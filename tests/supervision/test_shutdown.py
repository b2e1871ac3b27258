"""How a process is ended."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_smddp.supervision.shutdown import Shutdown


@pytest.mark.parametrize("error", [None, ValueError("bad")])
def test_a_process_is_ended_where_nothing_can_be_said(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the pipe any more. An OSError came before ``os._exit``: the process went on, unwatched."""
    codes: list[int] = []

    def broken(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", codes.append)
        patch.setattr(os, "write", broken)
        shutdown = Shutdown()
        if error is not None:
            shutdown.take_over(error)
        shutdown.force(143, "rank 0", "it did not stop")
    assert codes == [143]


def test_what_a_stream_of_the_users_holds_is_written_before_a_forced_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "stderr", None)  # closed, as in a service
    shutdown = Shutdown()
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        print("last line")
        shutdown.force(1, "rank 1", "rank 0 died")
        assert (tmp_path / "out").read_text() == "last line\n"


def test_clean_ups_run_before_a_forced_end_and_one_that_hangs_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    shutdown, cleaned, hung = Shutdown(), threading.Event(), threading.Event()
    shutdown.clean_ups += [hung.wait, cleaned.set]
    begin = time.monotonic()
    shutdown.force(1, "rank 1 (host a) at step 3 (backward)", "rank 0 died")
    assert cleaned.is_set()
    assert time.monotonic() - begin < 20.0
    hung.set()
    text = capfd.readouterr().err
    line = "lightning-smddp: rank 1 (host a) at step 3 (backward) is ended, exit code 1. Cause: rank 0 died\n"
    assert text.endswith(line)
    assert "test_clean_ups_run" in text  # where its threads are
