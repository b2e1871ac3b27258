"""Checks of arguments that several strategies have. Each raises ``ValueError`` with the value and the valid ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_smddp.communication.algorithms import NAMES


def require_bools(**values: object) -> None:
    """Each of ``values`` has to be True or False: any other text, ``"no"`` too, would count as True."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} has to be True or False.")


def require_cache(tuning_cache: object) -> None:
    """A path, or whether to use the usual one."""
    if not isinstance(tuning_cache, (str, os.PathLike, bool)):
        raise ValueError(
            f"tuning_cache={tuning_cache!r} has to be the path of a file, True for the usual one, or False for none."
        )


def require_arguments_of_ddp(accelerator: object, timeout: object) -> None:
    """The first by position is ``DDPStrategy``'s, not ours; and no number for a timedelta, which it hands on unseen."""
    if isinstance(accelerator, str) and accelerator in NAMES:
        raise ValueError(
            f"accelerator={accelerator!r} is the name of an algorithm. By position come the arguments of DDPStrategy, "
            f"of which `accelerator` is the first: write algorithm={accelerator!r}."
        )
    if timeout is not None and not isinstance(timeout, timedelta):
        raise ValueError(f"timeout={timeout!r} has to be a datetime.timedelta, such as timedelta(minutes=30), or None.")


def is_positive(value: object) -> bool:
    """Whether it is a finite number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")  # type: ignore[operator]


def require_known(strategy: Any, given: Iterable[str]) -> None:
    """Raise ``TypeError`` for arguments that neither the strategy nor ``DistributedDataParallel`` has."""
    inits = [vars(cls).get("__init__") for cls in (*type(strategy).__mro__, DistributedDataParallel)]
    known = {name for init in inits if init is not None for name in signature(init).parameters}
    known -= {"self", "args", "kwargs", "module"}
    for name in sorted(set(given) - known):
        raise _unknown(strategy, name, known)


def refuse_all(strategy: Any, given: Iterable[str]) -> None:
    """Raise ``TypeError`` for arguments that the strategy's own signature does not have."""
    of_ddp = set(signature(DistributedDataParallel.__init__).parameters)
    known = {
        name
        for name, parameter in signature(type(strategy).__init__).parameters.items()
        if name != "self" and parameter.kind is not Parameter.VAR_KEYWORD
    }
    for name in sorted(given):
        if name in of_ddp:
            raise TypeError(
                f"{type(strategy).__name__} has no argument {name!r}: it is DistributedDataParallel's, which a "
                "pipeline does not use. Leave it out."
            )
        raise _unknown(strategy, name, known)


def _unknown(strategy: Any, name: str, known: set[str]) -> TypeError:
    close = get_close_matches(name, known, 1)
    hint = f"Valid: {', '.join(sorted(known))}."
    if close:
        hint = f"Did you mean {close[0]!r}?"
    return TypeError(f"{type(strategy).__name__} has no argument {name!r}. {hint}")
