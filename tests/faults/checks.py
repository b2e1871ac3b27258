"""What must be true of every job that a fault has ended."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from lightning_smddp.checkpoint import files
from tests.faults.jobs import Result

BOUND_S = 10.0
WITHOUT_A_WORD = ("kill", "exit", "segv", "oom_kill", "stop", "node", "cut", "nap")
# Left in TMPDIR by torch itself, for errors that it hands from process to process.
TORCHS_OWN = re.compile(r"(pytorch-errorfile-|torchelastic_)")


def assert_ended(result: Result, bound_s: float = BOUND_S, code: int | None = None) -> None:
    """Within the bound, not with success, and nothing is left."""
    assert result.seconds is not None, f"no fault, or no end:\n{result.describe()}"
    assert not result.cut_off, result.describe()
    assert result.seconds < bound_s, result.describe()
    assert all(each not in (0, None) for each in result.codes), result.describe()
    assert code is None or result.code == code, result.describe()
    left = [path for path in result.left if not TORCHS_OWN.match(Path(path).name)]
    assert left == [], result.describe()


def assert_named(
    result: Result,
    rank: int,
    cause: str,
    phases: Iterable[str],
    survivors: Iterable[int] | None = None,
    step: int | None = None,
) -> None:
    """Every survivor names the rank, its host and process, the step, the phase, and the first cause.

    Of a rank that could not say more the step and phase are those of its last beat, half a second old.
    """
    if survivors is None:
        survivors = [other for other in range(result.case.world_size) if other != rank]
    step = result.case.faults[-1].step if step is None else step
    where = rf" at step {step}" if step >= 0 else ""
    where += rf" \(({'|'.join(phases)})\)"
    if result.case.faults[-1].kind in WITHOUT_A_WORD:
        where = r"(?: at step (?P<step>\d+))? \([\w ]+\)"
    verbs = "died|failed|fell silent|did not come|left"
    pattern = rf"[Rr]ank {rank} \(host \S+, process \d+\) ({verbs}){where}: .*{cause}"
    for survivor in survivors:
        found = re.search(pattern, result.said_by(survivor))
        assert found, f"rank {survivor}: {pattern}\n{result.describe()}"
        if "step" in found.groupdict():
            assert int(found["step"] or -1) <= step, result.describe()


def assert_saved(result: Result, at_least: int = 1) -> None:
    """All checkpoints that are in place are valid."""
    assert len(result.checkpoints) >= at_least, result.describe()
    for path in result.checkpoints:
        assert files.load(path)["global_step"] > 0
