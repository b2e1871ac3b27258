"""A callback that makes one rank fail at one place of a run, in one of many ways."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback

from tests.faults import journal, memory
from tests.faults.journal import main_process, note_fault

MESSAGE = "the user's own"
PEERS_WAIT_S = 0.3  # by then the other ranks have come to the collective
TWICE_AFTER_S = 1.5
NAP_S = 7.0
FILE_LIMIT = 200_000  # bytes, below the size of the model's checkpoint


@dataclass(frozen=True)
class Fault:
    """``rank`` fails in optimizer step ``step``.

    Attributes:
        rank: global rank.
        step: the number of finished optimizer steps; with ``save`` and ``validation`` the first at or after it.
        kind: ``kill`` (SIGKILL), ``exit`` (``os._exit(0)``), ``sysexit`` (``sys.exit(0)``), ``raise``, ``stop``
            (SIGSTOP), ``nan`` (a gradient becomes NaN), ``oom`` (``MemoryError``), ``segv``, ``hang``, ``launcher``
            (SIGKILL to the parent); signals to the job's first process (script, parent of spawned ranks, torchrun's
            agent): ``term``, ``term_twice``, ``int``, ``int_twice``, and to all of its process group ``term_group``,
            ``int_group``; while saving: ``full`` (no file
            may grow any more) and ``removed`` (the checkpoints' directory); ``oom_kill``: the kernel kills it for lack
            of memory; ``nap``: SIGSTOP, and SIGCONT after ``NAP_S``; to the rank's whole node: ``node`` (all processes
            are killed at once), ``cut`` (off the network) and ``blink`` (for a moment); ``none``: only the time counts.
        phase: ``setup``; ``data``: before the batch, which is still the step before; ``forward``: before the first
            module; ``backward``: at a gradient; ``comm``: likewise, when the other ranks wait in their collective;
            ``optimizer``: between gradients and update; ``save``: on rank 0 when a checkpoint's file is written and
            not yet in place, elsewhere before it; ``validation``.
        timed: whether the job's seconds count from here.
    """

    rank: int
    step: int
    kind: str
    phase: str
    timed: bool = True

    def strike(self, trainer: Any) -> None:
        """Do it. Returns only for kinds that let the rank go on."""
        if self.timed:
            note_fault()
        KINDS[self.kind](trainer)


_struck: set[int] = set()  # of this process: the callback's own attributes begin anew with each trial of a step


class Injection(Callback):
    """A callback by which a :class:`Fault` comes."""

    def __init__(self, fault: Fault) -> None:
        if fault.kind not in KINDS:
            raise ValueError(f"kind={fault.kind!r} is unknown. Valid: {', '.join(KINDS)}.")
        self.fault = fault

    @property
    def state_key(self) -> str:
        return f"Injection-{self.fault}"

    @property
    def _has_struck(self) -> bool:
        return id(self) in _struck

    def _is_due(self, trainer: Any, phase: str) -> bool:
        here = trainer.global_rank == self.fault.rank and self.fault.phase == phase
        return here and not self._has_struck and trainer.global_step >= self.fault.step

    def _strike(self, trainer: Any) -> None:
        if not self._has_struck:
            _struck.add(id(self))
            self.fault.strike(trainer)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._is_due(trainer, "setup"):
            self._strike(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._is_due(trainer, "data"):
            self._strike(trainer)
        if self._is_due(trainer, "forward"):
            torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self._strike(trainer))
        for phase, delay in (("backward", 0.0), ("comm", PEERS_WAIT_S)):
            if self._is_due(trainer, phase):
                self._strike_at_a_gradient(trainer, pl_module, delay)

    def _strike_at_a_gradient(self, trainer: Any, module: Any, delay: float) -> None:
        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            if self._has_struck:
                return None
            time.sleep(delay)
            self._strike(trainer)
            return torch.full_like(gradient, float("nan")) if self.fault.kind == "nan" else None

        for parameter in module.parameters():
            if parameter.requires_grad and not parameter.is_meta:
                parameter.register_hook(hook)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._is_due(trainer, "optimizer"):
            self._strike(trainer)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking and self._is_due(trainer, "validation"):
            self._strike(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if not self._is_due(trainer, "save"):
            return
        if trainer.global_rank > 0 or self.fault.kind == "full":
            self._strike(trainer)
        else:  # ours synchronizes what it has written, then renames; Lightning moves a temporary file
            _before(os, "fsync", lambda: self._strike(trainer))
            _before(shutil, "move", lambda: self._strike(trainer))


def _before(module: Any, name: str, action: Callable[[], None]) -> None:
    original = getattr(module, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    setattr(module, name, replaced)


# ---- kinds ----


def _raise(trainer: Any) -> NoReturn:
    raise ZeroDivisionError(MESSAGE)


def _out_of_memory(trainer: Any) -> NoReturn:
    raise MemoryError("cannot allocate 7 GiB")


def _be_killed_for_memory(trainer: Any) -> None:
    memory.enter_cgroup(journal.directory())
    hoard = []
    while True:
        hoard.append(b"x" * 2**20)


def _nap(trainer: Any) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {NAP_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(trainer: Any) -> None:
    while True:
        time.sleep(3600.0)


def _send(signum: int, after_s: float = 0.0) -> None:
    if after_s > 0:
        threading.Thread(target=lambda: (time.sleep(after_s), _send(signum)), daemon=True).start()
    else:
        os.kill(main_process(), signum)


def _twice(signum: int) -> None:
    _send(signum)
    _send(signum, TWICE_AFTER_S)


def _limit_files(trainer: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))


def _remove_directory(trainer: Any) -> None:
    shutil.rmtree(Path(trainer.checkpoint_callback.dirpath))


KINDS: dict[str, Callable[[Any], object]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda _: os._exit(0),
    "sysexit": lambda _: sys.exit(0),
    "raise": _raise,
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "nan": lambda _: None,  # by the hook that strikes
    "oom": _out_of_memory,
    "segv": lambda _: ctypes.string_at(0),
    "oom_kill": _be_killed_for_memory,
    "node": lambda _: journal.ask("node"),
    "cut": lambda _: journal.ask("cut"),
    "blink": lambda _: journal.ask("blink"),
    "nap": _nap,
    "hang": _hang,
    "launcher": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "term": lambda _: _send(signal.SIGTERM),
    "term_twice": lambda _: _twice(signal.SIGTERM),
    "int": lambda _: _send(signal.SIGINT),
    "int_twice": lambda _: _twice(signal.SIGINT),
    "term_group": lambda _: os.killpg(os.getpgid(main_process()), signal.SIGTERM),
    "int_group": lambda _: os.killpg(os.getpgid(main_process()), signal.SIGINT),
    "none": lambda _: None,
    "full": _limit_files,
    "removed": _remove_directory,
}
