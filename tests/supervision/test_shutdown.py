"""How a process is ended."""

from __future__ import annotations

import errno
import os
import threading
import time

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
