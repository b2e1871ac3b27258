"""What a job is to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injection import Fault


@dataclass(frozen=True)
class Case:
    """A job of some ranks, and the faults that it meets.

    Attributes:
        faults: what happens to it.
        strategy: ``smddp``, ``smddp_pipeline``, or stock ``ddp``.
        launcher: ``script``, ``spawn`` or ``torchrun``.
        world_size: number of ranks.
        nodes: equally many ranks on each; more than one: see ``tests.faults.nodes``.
        workers: of each rank's DataLoader.
        timeout: of collectives, in seconds.
        options: more arguments of our strategy.
        trainer: more arguments of the ``Trainer``.
        steps: optimizer steps, when nothing happens.
        step_s: seconds that each takes at least.
        save_every: steps between checkpoints; 0: none.
        saves_on_exception: so that a checkpoint is due when a rank fails.
        batches: of each rank in an epoch, if they differ.
        stream: whether the data has no length.
        asleep: seconds that a rank sleeps before the step of a fault, outside of collectives, by rank.
        deeply: in one go, as code that is no Python code takes its time.
        real: the launcher starts new interpreters, each of which imports everything. Else they are forked.
        ignores_sigint: as under ``nohup`` or in the background.
        resume: the path of a checkpoint to start from.
        port: of the job's store, if given.
    """

    faults: list[Fault] = field(default_factory=list)
    strategy: str = "smddp"
    launcher: str = "script"
    world_size: int = 2
    nodes: int = 1
    workers: int = 0
    timeout: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    steps: int = 400
    step_s: float = 0.01
    save_every: int = 0
    saves_on_exception: bool = False
    batches: list[int] | None = None
    stream: bool = False
    asleep: dict[int, float] = field(default_factory=dict)
    deeply: bool = False
    real: bool = False
    ignores_sigint: bool = False
    resume: str | None = None
    port: int | None = None

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Case:
        """The reverse."""
        values = json.loads(path.read_text())
        values["faults"] = [Fault(**fault) for fault in values["faults"]]
        values["asleep"] = {int(rank): seconds for rank, seconds in values["asleep"].items()}
        return cls(**values)

    @property
    def devices(self) -> int:
        """Ranks of a node."""
        return self.world_size // self.nodes


def exhaustive(*cases: Any) -> list[Any]:
    """The same, in ``make exhaustive`` alone."""
    return [pytest.param(*case.values, marks=pytest.mark.exhaustive, id=case.id) for case in cases]
