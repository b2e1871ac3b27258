"""What ``smddp`` and ``smddp_pipeline`` do so that nothing is lost: their common options, and where they act."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

from lightning_smddp.strategies.option_checks import is_positive, require_bools

OnNonfinite = Literal["error", "skip", "ignore"]


@dataclass(frozen=True)
class ReliabilityOptions:
    """The arguments of both strategies that are about faults, stops and checkpoints, checked."""

    init_timeout: timedelta | None
    stop_grace: timedelta
    resume: str | None
    on_nonfinite: str
    async_save: bool
    sharded: bool

    @classmethod
    def parse(
        cls,
        init_timeout: timedelta | float | None,
        stop_grace: timedelta | float,
        resume: str | None,
        on_nonfinite: str,
        async_save: bool,
        sharded: bool,
    ) -> ReliabilityOptions:
        """Check what the user wrote. Raises ``ValueError`` with the valid values."""
        if resume not in (None, "auto", "never"):
            raise ValueError(
                f"resume={resume!r} is unknown. Valid: 'auto' (continue from the newest valid checkpoint, if there is "
                "one), 'never', or None: 'auto' in a SageMaker job, else 'never'. To continue from one file, call "
                "`trainer.fit(model, ckpt_path=...)`."
            )
        if on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(f"on_nonfinite={on_nonfinite!r} is unknown. Valid: 'error', 'skip', 'ignore'.")
        require_bools(async_save=async_save, sharded=sharded)
        if async_save and sharded:
            raise ValueError(
                "async_save=True cannot be used with sharded=True: all ranks write a sharded checkpoint together. "
                "Choose one: with sharded=True each rank writes its own part only, which is quick."
            )
        start = None if init_timeout is None else _duration("init_timeout", init_timeout)
        return cls(start, _duration("stop_grace", stop_grace), resume, on_nonfinite, async_save, sharded)


def _duration(name: str, value: Any) -> timedelta:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_positive(seconds):
        raise ValueError(f"{name}={value!r} has to be positive (seconds or a timedelta).")
    return timedelta(seconds=seconds)
