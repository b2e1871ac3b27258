"""A process that saves to a bucket again and again and is killed, on request: the body of a forked process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

from tests.checkpoint.models import save


def save_and_be_killed(url: str, environment: Mapping[str, str], requests: Connection) -> None:
    """For each step that comes: a child saves it and those behind it, until it is killed. Ends after None.

    The child alone uses s3fs, which has a thread of its own.
    """
    os.environ.update(environment)
    kill = 0
    while (first := requests.recv()) is not None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            for step in range(first, 10**9):
                save(url, step)
                os.write(writer, b".")
        os.read(reader, 1)  # it works
        time.sleep(0.018 * kill)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        requests.send("killed")
        kill += 1
