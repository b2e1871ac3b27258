"""Programs that start without imports: forked, where a launcher means to start an interpreter.

A launcher's own code runs as ever, down to ``subprocess.Popen``. What that would execute is forked instead, from a
process that has imported torch and Lightning, and gets what it would have found: descriptors, signal handlers and
environment as after ``exec``, and no state of ``multiprocessing``.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

PROGRAM = "tests.faults.train"
_original = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def fork_programs() -> None:
    """From here on ``Popen([python, "-m", PROGRAM, ...])`` forks, in this process and those that it forks."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def fork(command: Sequence[str], environment: Mapping[str, str], new_session: bool = False) -> int:
    """Start ``[python, "-m", MODULE, ARGUMENTS...]``; returns the process's number."""
    pid = os.fork()
    if pid == 0:
        try:
            if new_session:
                os.setsid()
            _be_new(environment)
            _run(list(command))
        finally:
            os._exit(70)
    return pid


def _execute_child(self: Any, args: Any, *rest: Any) -> None:
    if PROGRAM not in args:
        _original(self, args, *rest)
        return
    names = ("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell")
    given = dict(zip(names, rest, strict=False))
    *_, start_new_session, _process_group = rest
    sys.stdout.flush()
    command = [sys.executable, "-m", *args[args.index(PROGRAM) :]]
    self.pid = fork(command, given["env"] or os.environ, start_new_session)
    self._child_created = True


def _be_new(environment: Mapping[str, str]) -> None:
    """Leave behind what does not survive ``exec``."""
    variables = dict(environment)
    os.environ.clear()
    os.environ.update(variables)
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if descriptor > 2 and not os.get_inheritable(descriptor):
                os.close(descriptor)
        except OSError:  # that of the listing itself
            continue
    atexit._clear()
    tempfile.tempdir = None
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]


def _run(command: list[str]) -> None:
    """As an interpreter does, to the end."""
    module, sys.argv = command[2], command[2:]
    code = 0
    try:
        if module == PROGRAM:
            import tests.faults.train

            sys.modules["__main__"] = tests.faults.train  # by whose name Lightning starts the script again
            tests.faults.train.main(*sys.argv[1:])
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)
