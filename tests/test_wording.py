"""Numbers in messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_smddp.wording import counted

PACKAGE = Path(__file__).parent.parent / "lightning_smddp"
# What a message counts that may be one.
NOUNS = "units|modules|calls|outputs|things|groups|respects|elements|optimizers|micro-batches"


@pytest.mark.parametrize(
    ("number", "noun", "text"), [(1, "unit", "1 unit"), (0, "step", "0 steps"), (2, "micro-batch", "2 micro-batches")]
)
def test_one_is_not_many(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_messages_do_not_write_one_units() -> None:
    count = re.compile(rf"\{{[^{{}}]*(?:len\(|numel\(\)|count|units)[^{{}}]*\}} (?:{NOUNS})\b")
    found = [
        f"{path.name}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if count.search(line) and not line.strip().startswith(("assert", "#"))
    ]
    assert found == []
