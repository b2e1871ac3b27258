"""Options in groups, as users give them to all strategies: ``communication=`` and ``reliability=``.

A group is checked where it is made and keeps what the user wrote; what follows from that are its properties.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from lightning_smddp.communication.algorithms import NAMES
from lightning_smddp.communication.autotune import default_cache
from lightning_smddp.communication.compression import Compression
from lightning_smddp.strategies.option_checks import OptionGroups, duration, group_of, is_positive, require_bools

OnNonfinite = Literal["error", "skip", "ignore"]


class FromDDP(TypedDict, total=False):
    """Arguments of Lightning's ``DDPStrategy`` that strategies of other classes have as well, by name."""

    accelerator: Any
    parallel_devices: Any
    cluster_environment: Any
    checkpoint_io: Any
    precision_plugin: Any
    process_group_backend: str | None
    timeout: timedelta | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]


@dataclass(frozen=True)
class CommunicationOptions:
    """How ranks work together on gradients, beside ``algorithm`` and ``compression``.

    Args:
        collective_timeout: how long a rank waits for the others in a collective, in seconds or as a timedelta; None
            is DDP's ``timeout``, which also bounds the start.
        tuning_cache: file for what ``algorithm="auto"`` measured; True is ``~/.cache/lightning_smddp/plans.json``,
            False measures at each start.
        verbose: print a table at the start of fit and a report at its end.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    collective_timeout: float | timedelta | None = None
    tuning_cache: bool | str | Path = True
    verbose: bool = True

    def __post_init__(self) -> None:
        require_bools(verbose=self.verbose)
        if not isinstance(self.tuning_cache, (str, os.PathLike, bool)):
            raise ValueError(
                f"tuning_cache={self.tuning_cache!r} has to be the path of a file, True for the usual one, or False "
                "for none."
            )
        if self.collective_timeout is not None:
            duration("collective_timeout", self.collective_timeout, ", or None for DDP's `timeout`")

    @property
    def limit(self) -> timedelta | None:
        """``collective_timeout`` as a timedelta; None is left to DDP's ``timeout``."""
        if self.collective_timeout is None:
            return None
        return duration("collective_timeout", self.collective_timeout)

    @property
    def cache(self) -> Path | None:
        """The file for measured plans; None for none."""
        if self.tuning_cache is False:
            return None
        if self.tuning_cache is True:
            return default_cache()
        return Path(self.tuning_cache)


@dataclass(frozen=True)
class ReliabilityOptions:
    """Faults, stops and checkpoints.

    Args:
        init_timeout: how long ranks wait for each other at the start, in seconds or as a timedelta; None is 10
            minutes, or DDP's ``timeout`` if that is less.
        stop_grace: seconds, or a timedelta, from SIGTERM to the end of the process, checkpoint included.
        on_nonfinite: when a gradient is NaN or infinite on any rank: ``"error"`` names rank, step and parameter,
            ``"skip"`` leaves this step out on all ranks, ``"ignore"`` does not look.
        async_save: write checkpoints in the background, from a copy.
        sharded: save a directory with a file of each rank, instead of one file gathered on rank 0.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    init_timeout: float | timedelta | None = None
    stop_grace: float | timedelta = 90.0
    on_nonfinite: OnNonfinite = "error"
    async_save: bool = False
    sharded: bool = False

    def __post_init__(self) -> None:
        if self.on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r} is unknown. Valid: 'error', 'skip', 'ignore'.")
        require_bools(async_save=self.async_save, sharded=self.sharded)
        if self.async_save and self.sharded:
            raise ValueError(
                "async_save=True cannot be used with sharded=True: all ranks write a sharded checkpoint together. "
                "Choose one: with sharded=True each rank writes its own part only, which is quick."
            )
        if self.init_timeout is not None:
            duration("init_timeout", self.init_timeout)
        duration("stop_grace", self.stop_grace)

    @property
    def start_limit(self) -> timedelta | None:
        """``init_timeout`` as a timedelta; None is left to ``rendezvous.start_limit``."""
        if self.init_timeout is None:
            return None
        return duration("init_timeout", self.init_timeout)

    @property
    def stop_limit(self) -> timedelta:
        """``stop_grace`` as a timedelta."""
        return duration("stop_grace", self.stop_grace)


# What all strategies have, by the name of the argument.
GROUPS: OptionGroups = {"communication": CommunicationOptions, "reliability": ReliabilityOptions}


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are averaged: arguments of a strategy, and its group ``communication``.

    Attributes:
        algorithm: a name, or ``"auto"``.
        compression: None is exact.
        bucket_cap_mb: MiB; None has it chosen.
        communication: the group.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    algorithm: str
    compression: Compression | None
    bucket_cap_mb: float | None
    communication: CommunicationOptions

    def __post_init__(self) -> None:
        if self.algorithm not in NAMES:
            raise ValueError(f"algorithm={self.algorithm!r} is unknown. Valid: {', '.join(map(repr, NAMES))}.")
        if self.bucket_cap_mb is not None and not is_positive(self.bucket_cap_mb):
            raise ValueError(
                f"bucket_cap_mb={self.bucket_cap_mb!r} has to be positive (MiB), or None to have it tuned."
            )

    @classmethod
    def of(cls, algorithm: str, compression: Any, bucket_cap_mb: float | None, communication: Any) -> GradientOptions:
        """From what users write: ``compression`` as a name, ``communication`` as a dict, too."""
        group = group_of("communication", CommunicationOptions, communication)
        return cls(algorithm, Compression.parse(compression), bucket_cap_mb, group)


def require_resume(resume: Any) -> None:
    """Raise ``ValueError`` unless ``resume`` is one of the valid values."""
    if resume not in (None, "auto", "never"):
        raise ValueError(
            f"resume={resume!r} is unknown. Valid: 'auto' (continue from the newest valid checkpoint, if there is "
            "one), 'never', or None: 'auto' in a SageMaker job, else 'never'. To continue from one file, call "
            "`trainer.fit(model, ckpt_path=...)`."
        )


def require_shard(shard: Any, why_not_more: str = "") -> None:
    """Raise ``ValueError`` unless ``shard`` is one of the valid values; ``why_not_more`` ends the message."""
    if shard not in (None, "optimizer"):
        valid = "'optimizer' (each rank steps a share of the parameters), or None."
        raise ValueError(f"shard={shard!r} is unknown. Valid: {valid}{why_not_more}")
