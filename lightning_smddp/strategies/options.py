"""Options in groups, as users give them to all strategies: ``communication=`` and ``reliability=``.

A group is checked where it is made and keeps what the user wrote; what follows from that are its properties. Messages
of checks hold the value, the valid ones, and what to write.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_args

from torch.nn.parallel import DistributedDataParallel

from lightning_smddp.communication.algorithms import NAMES
from lightning_smddp.communication.autotune import default_cache
from lightning_smddp.communication.compression import Compression

OptionGroups = Mapping[str, type[Any]]  # the dataclass of each argument that is a group of options
_Group = TypeVar("_Group")

# ---- values ----

OnNonfinite = Literal["error", "skip", "ignore"]


def require_bools(**values: object) -> None:
    """Each of ``values`` has to be True or False: any other text, ``"no"`` too, would count as True."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} has to be True or False.")


def is_positive(value: object) -> bool:
    """Whether it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value < float("inf")


def duration(name: str, value: Any, otherwise: str = "") -> timedelta:
    """``value``, seconds or a timedelta, as a timedelta.

    Raises:
        ValueError: it is not positive; ``otherwise`` is what else the argument ``name`` may be.
    """
    seconds = value
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    if not is_positive(seconds):
        raise ValueError(f"{name}={value!r} has to be positive (seconds or a timedelta){otherwise}.")
    return timedelta(seconds=seconds)


# ---- groups of options ----


def group_of(name: str, kind: type[_Group], value: Any) -> _Group:
    """The value of the argument ``name``, which is a group: an object of ``kind``, or its arguments in a dict.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, kind):
        return value
    known = _names(kind)
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name}={value!r} has to be a group of options: {name}={kind.__name__}(...), of {', '.join(known)}."
        )
    for key in value:
        if key not in known:
            hint = _hint(key, known, {})
            raise ValueError(f"{name}={dict(value)!r}: {kind.__name__} has no {key!r}. {hint}")
    return kind(**value)


def with_hints(kind: type[_Group]) -> type[_Group]:
    """``kind``, a group that says which option was meant by an unknown one."""
    plain = kind.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **given: Any) -> None:
        known = _names(kind)
        for name in given:
            if name not in known:
                raise TypeError(f"{kind.__name__} has no {name!r}. {_hint(name, known, {})}")
        plain(self, *args, **given)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def refuse_moved(strategy: Any, given: Mapping[str, Any], groups: OptionGroups) -> None:
    """Raise ``TypeError`` for arguments that belong into a group, with the line to write."""
    moved = []
    to_write = []
    for group, kind in groups.items():
        arguments = []
        for name in _names(kind):
            if name in given:
                moved.append(repr(name))
                arguments.append(f"{name}={_code(given[name])}")
        if arguments:
            to_write.append(f"{group}={kind.__name__}({', '.join(arguments)})")
    if moved:
        names = " and ".join(moved)
        line = ", ".join(to_write)
        raise TypeError(f"{type(strategy).__name__} takes {names} in a group of options. Write {line}.")


def moved_in_file(error: str, groups: OptionGroups) -> str:
    """What to add to an ``error`` of jsonargparse, on an option that is not accepted, if it is in one of ``groups``."""
    refused = re.search(r"Option '(\w+)' is not accepted", error)
    if refused is None:
        return ""
    option = refused[1]
    for group, kind in groups.items():
        if option in _names(kind):
            return f"\n{option!r} is in a group of options. Write {group}: {{{option}: ...}} instead."
    return ""


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _code(value: Any) -> str:
    """``value`` as one writes it; functions by name."""
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return repr(value)


# ---- arguments of DDPStrategy and of DistributedDataParallel ----


def by_name(init: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments for ``init``, which Lightning's ``DDPStrategy`` defines, by name.

    Raises:
        TypeError: as a call would.
        ValueError: what it would hand on unseen cannot work.
    """
    # `DDPStrategy` takes most by name, and the arguments of `DistributedDataParallel` as its `**kwargs`.
    bound = signature(init).bind_partial(*args, **kwargs)
    given = dict(bound.arguments)
    given |= given.pop("kwargs", {})
    accelerator = given.get("accelerator")
    if isinstance(accelerator, str) and accelerator in NAMES:
        raise ValueError(
            f"accelerator={accelerator!r} is the name of an algorithm. By position come the arguments of DDPStrategy, "
            f"of which `accelerator` is the first: write algorithm={accelerator!r}."
        )
    timeout = given.get("timeout")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise ValueError(f"timeout={timeout!r} has to be a datetime.timedelta, such as timedelta(minutes=30), or None.")
    backend = given.get("process_group_backend")
    if backend == "smddp":
        raise ValueError(
            "process_group_backend='smddp' is AWS's closed library, whose last build is for PyTorch 2.4; this "
            "package needs 2.11. Leave process_group_backend out: strategy='smddp' does not need it."
        )
    if backend == "auto":
        given["process_group_backend"] = None  # Lightning's own word for it
    return given


def require_known(strategy: Any, given: Mapping[str, Any], groups: OptionGroups) -> None:
    """Raise ``TypeError`` for arguments that neither the strategy nor ``DistributedDataParallel`` has."""
    refuse_moved(strategy, given, groups)
    # Every constructor hands on what it does not know itself, and `DDPStrategy` hands it on to the wrapper.
    known: set[str] = set()
    for cls in (*type(strategy).__mro__, DistributedDataParallel):
        init = vars(cls).get("__init__")
        if init is not None and cls is not object:
            known |= set(signature(init).parameters)
    known -= {"self", "args", "kwargs", "module"}
    for name in sorted(set(given) - known):
        raise _unknown(strategy, name, known, groups)


def require_known_to_pipeline(
    strategy: Any, given: Mapping[str, Any], of_ddp: Iterable[str], groups: OptionGroups
) -> None:
    """Raise ``TypeError`` for arguments that are neither in the signature of ``strategy`` nor in ``of_ddp``."""
    refuse_moved(strategy, given, groups)
    known = set(of_ddp)
    for parameter in signature(type(strategy).__init__).parameters.values():
        if parameter.kind is Parameter.KEYWORD_ONLY:
            known.add(parameter.name)
    for name in sorted(set(given) - known):
        if name in signature(DistributedDataParallel.__init__).parameters:
            raise TypeError(
                f"{type(strategy).__name__} has no argument {name!r}: it is DistributedDataParallel's, which a "
                "pipeline does not use. Leave it out."
            )
        raise _unknown(strategy, name, known, groups)


def _unknown(strategy: Any, name: str, known: Iterable[str], groups: OptionGroups) -> TypeError:
    return TypeError(f"{type(strategy).__name__} has no argument {name!r}. {_hint(name, known, groups)}")


def _hint(name: str, known: Iterable[str], groups: OptionGroups) -> str:
    """What may have been meant by ``name``: one of the ``known`` arguments, or an option in a group."""
    written = {option: repr(option) for option in known}
    for group, kind in groups.items():
        for option in _names(kind):
            written[option] = f"{group}={kind.__name__}({option}=...)"
    close = get_close_matches(name, written, 1)
    if close:
        meant = written[close[0]]
        return f"Did you mean {meant}?"
    return f"Valid: {', '.join(sorted(known))}."


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
        """``stop_grace``, seconds or a timedelta, as a timedelta. Raises ``ValueError`` unless it is positive."""
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
            valid = ", ".join(map(repr, NAMES))
            raise ValueError(f"algorithm={self.algorithm!r} is unknown. Valid: {valid}.")
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
