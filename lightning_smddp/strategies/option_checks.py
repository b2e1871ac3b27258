"""Checks of what the strategies' constructors are given. Messages hold the value, the valid ones, and what to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, TypeVar

from torch.nn.parallel import DistributedDataParallel

from lightning_smddp.communication.algorithms import NAMES

OptionGroups = Mapping[str, type[Any]]  # the dataclass of each argument that is a group of options
_Group = TypeVar("_Group")

# ---- values ----


def require_bools(**values: object) -> None:
    """Each of ``values`` has to be True or False: any other text, ``"no"`` too, would count as True."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} has to be True or False.")


def is_positive(value: object) -> bool:
    """Whether it is a finite number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")  # type: ignore[operator]


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
            raise ValueError(f"{name}={dict(value)!r}: {kind.__name__} has no {key!r}. {_hint(key, known, {})}")
    return kind(**value)


def refuse_moved(strategy: Any, given: Mapping[str, Any], groups: OptionGroups) -> None:
    """Raise ``TypeError`` for arguments that belong into a group, with the line to write."""
    lines, moved = [], []
    for group, kind in groups.items():
        inside = [name for name in _names(kind) if name in given]
        if inside:
            moved += inside
            lines.append(f"{group}={kind.__name__}({', '.join(f'{name}={_code(given[name])}' for name in inside)})")
    if moved:
        names = " and ".join(map(repr, moved))
        raise TypeError(f"{type(strategy).__name__} takes {names} in a group of options. Write {', '.join(lines)}.")


def moved_in_file(error: str, groups: OptionGroups) -> str:
    """What to add to an ``error`` of jsonargparse, on an option that is not accepted, if it is in one of ``groups``."""
    refused = re.search(r"Option '(\w+)' is not accepted", error)
    for group, kind in groups.items():
        if refused is not None and refused[1] in _names(kind):
            return f"\n{refused[1]!r} is in a group of options. Write {group}: {{{refused[1]}: ...}} instead."
    return ""


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _code(value: Any) -> str:
    """``value`` as one writes it; functions by name."""
    return str(getattr(value, "__qualname__", repr(value)))


# ---- arguments of DDPStrategy and of DistributedDataParallel ----


def by_name(init: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments for ``init``, which Lightning's ``DDPStrategy`` defines, by name.

    Raises:
        TypeError: as a call would.
        ValueError: what it would hand on unseen cannot work.
    """
    given = dict(signature(init).bind_partial(*args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    accelerator, timeout = given.get("accelerator"), given.get("timeout")
    if isinstance(accelerator, str) and accelerator in NAMES:
        raise ValueError(
            f"accelerator={accelerator!r} is the name of an algorithm. By position come the arguments of DDPStrategy, "
            f"of which `accelerator` is the first: write algorithm={accelerator!r}."
        )
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
    inits = [vars(cls).get("__init__") for cls in (*type(strategy).__mro__, DistributedDataParallel)]
    known = {name for init in inits if init is not None for name in signature(init).parameters}
    known -= {"self", "args", "kwargs", "module"}
    for name in sorted(set(given) - known):
        raise _unknown(strategy, name, known, groups)


def require_known_to_pipeline(
    strategy: Any, given: Mapping[str, Any], of_ddp: Iterable[str], groups: OptionGroups
) -> None:
    """Raise ``TypeError`` for arguments that are neither in the signature of ``strategy`` nor in ``of_ddp``."""
    refuse_moved(strategy, given, groups)
    own = signature(type(strategy).__init__).parameters.values()
    known = {p.name for p in own if p.kind is Parameter.KEYWORD_ONLY} | set(of_ddp)
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
        written |= {option: f"{group}={kind.__name__}({option}=...)" for option in _names(kind)}
    close = get_close_matches(name, written, 1)
    if close:
        return f"Did you mean {written[close[0]]}?"
    return f"Valid: {', '.join(sorted(known))}."
