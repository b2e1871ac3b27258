"""Programs that start without imports: forked, where a launcher means to start an interpreter.

A launcher's own code runs as ever, down to ``subprocess.Popen``. What that would execute is forked instead, from a
process that has imported torch and Lightning, and gets what it would have found: descriptors, signal handlers and
environment as after ``exec``, and no state of ``multiprocessing``. Programs are scripts (``python train.py ...``) and
modules (``python -m torch.distributed.run ...``); of modules of these tests it is ``main(*arguments)`` that runs.
"""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

_original = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_spawnv = multiprocessing_util.spawnv_passfds
_PARAMETERS = [*inspect.signature(_original).parameters][2:]


def fork_programs() -> None:
    """From here on ``Popen`` of a Python program forks, in this process and those that it forks."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    # For its log torchrun looks up the name of its caller, in all modules there are: here that takes so long that nodes
    # take each other for dead.
    dynamic_rendezvous.get_method_name = lambda depth=2: "-"


def fork_spawned() -> None:
    """And what ``multiprocessing`` spawns, where torch allows a process to fork that has run a backward pass."""
    if torch.cuda.device_count() == 0:
        multiprocessing_util.spawnv_passfds = _spawn_process


def fork(
    command: Sequence[str],
    environment: Mapping[str, str],
    new_session: bool = False,
    cwd: Any = None,
    streams: Sequence[int] = (),
    passed: Sequence[int] = (),
) -> int:
    """Start ``[python, SCRIPT or "-m", MODULE or "-c", CODE, ARGUMENTS...]``; returns the process's number."""
    pid = os.fork()
    if pid == 0:
        try:
            if new_session:
                os.setsid()
            if cwd is not None:
                os.chdir(cwd)
            for target, descriptor in enumerate(streams):
                if descriptor >= 0:
                    os.dup2(descriptor, target)
            for descriptor in passed:
                os.set_inheritable(descriptor, True)
            become(command, environment)
        finally:
            os._exit(70)
    return pid


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """What ``exec`` does, for a process that has just been forked."""
    _be_new(environment)
    _run(list(command))


def _execute_child(self: Any, args: Any, *rest: Any) -> None:
    command = _program(args)
    if command is None:
        _original(self, args, *rest)
        return
    given = dict(zip(_PARAMETERS, rest, strict=True))
    streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    sys.stdout.flush()
    self.pid = fork(
        command, given["env"] or os.environ, given["start_new_session"], given["cwd"], streams, given["pass_fds"]
    )
    self._child_created = True


def _spawn_process(path: Any, args: Sequence[str], passfds: Sequence[int]) -> int:
    """In the place of ``multiprocessing.util.spawnv_passfds``, which starts its servers, too."""
    if args[-1] != "--multiprocessing-fork":
        return _spawnv(path, args, passfds)
    return fork([*args[:1], *args[-3:]], os.environ, passed=passfds)


def _program(args: Any) -> list[str] | None:
    """``[python, SCRIPT or "-m", MODULE, ...]``, if that is what ``args`` would start."""
    words = [str(word) for word in args] if isinstance(args, (list, tuple)) else []
    if words[:1] != [sys.executable]:
        return None
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    return [words[0], *rest] if rest and (rest[0] == "-m" or rest[0].endswith(".py")) else None


def _be_new(environment: Mapping[str, str]) -> None:
    """Leave behind what does not survive ``exec``."""
    variables = dict(environment)
    os.environ.clear()
    os.environ.update(variables)
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    # Objects of the parent still know the numbers of its descriptors, and close them when they are collected. So each
    # number stays taken: else it would be given to a new descriptor, such as gloo's, which would be closed with them.
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if descriptor > 2 and not os.get_inheritable(descriptor):
                os.dup2(nothing, descriptor, inheritable=False)
        except OSError:  # that of the listing itself
            continue
    atexit._clear()
    tempfile.tempdir = None
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]


def _run(command: list[str]) -> NoReturn:
    """As an interpreter does, to the end."""
    sys.argv = command[2:] if command[1] == "-m" else command[1:]
    code = 0
    try:
        if command[1] == "-c":
            sys.argv = ["-c", *command[3:]]
            exec(command[2], {"__name__": "__main__"})
        elif command[1] != "-m":
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
        elif sys.argv[0].startswith("tests."):  # imported already
            module = import_module(sys.argv[0])
            sys.modules["__main__"] = module  # by whose name Lightning starts the script again
            module.main(*sys.argv[1:])
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)
