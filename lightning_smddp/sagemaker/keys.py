"""What becomes of the keys of SageMaker's configurations: tables, and the one error that lists all that is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key without an option of ours of the same meaning.

    Attributes:
        neutral: values that ask for nothing we would have to do; None: every value.
        cure: what to do for any other value, as a sentence.
        cured_by: options of ours which, when they are given beside the configuration, answer the key.
        note: what is said when a value is given that is accepted, though it changes nothing.
    """

    neutral: tuple[Any, ...] | None = None
    cure: str = ""
    cured_by: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Reading:
    """What a configuration has come to so far.

    Attributes:
        given: options that the user gives beside the configuration.
        options: of the strategy.
        notes: what the user should know, in sentences.
        problems: what cannot be done, each with its cure.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def refuse(self, what: str, cure: str) -> None:
        """Note a problem."""
        self.problems.append(f"{what}: {cure}")

    def unknown(self, name: str, known: Iterable[str], elsewhere: Mapping[str, Iterable[str]] | None = None) -> None:
        """Note that ``name`` is none of the ``known`` keys, with what may have been meant."""
        for other, keys in (elsewhere or {}).items():
            if name in keys:
                self.refuse(name, f"is a key of {other}. Remove it.")
                return
        near = difflib.get_close_matches(name, list(known), n=2)
        meant = f"Known: {', '.join(sorted(known))}."
        if near:
            meant = f"Did you mean {' or '.join(map(repr, near))}?"
        self.refuse(name, f"is unknown. {meant}")

    def look_up(self, table: Mapping[str, Key], values: Mapping[str, Any]) -> None:
        """Go through the keys of ``values`` that are in ``table``."""
        for name, value in values.items():
            key = table.get(name)
            if key is None:
                continue
            if key.neutral is not None and not _is_one_of(value, key.neutral):
                if not set(key.cured_by) & set(self.given):
                    self.refuse(f"{name}={value!r}", key.cure)
            elif key.note:
                self.notes.append(f"{name}: {key.note}")

    def count(self, values: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
        """The value of ``name``, which has to be a number from 1; the default if it is absent, or wrong."""
        value = values.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            self.refuse(f"{name}={value!r}", "has to be a number from 1.")
            return default
        return value

    def choice(self, values: Mapping[str, Any], name: str, default: str, choices: Mapping[str, str], cure: str) -> str:
        """What ``choices`` has for the value of ``name``; that of the default if it has nothing."""
        value = values.get(name, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(f"{name}={value!r}", cure)
            return choices[default]
        return choices[value]

    def finish(self, what: str) -> None:
        """Raise ``ValueError`` with everything that is wrong in ``what``, if anything is."""
        if self.problems:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            raise ValueError(f"{what} cannot be done as it is:{lines}")


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """As ``in``, but 1 is not True."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)
