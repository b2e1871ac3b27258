"""The *after* parts of ``docs/migrating.md`` make the strategies that it names; `tests/test_readme.py` runs them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from lightning_smddp import PipelineStrategy, SMDDPFSDPStrategy, SMDDPStrategy, from_sagemaker
from tests.sagemaker.sdk_requests import HERE
from tests.test_readme import snippets

PAGE = HERE.parent.parent / "docs" / "migrating.md"


def made_by(text: str) -> Any:
    """The strategy, or its name, that a snippet gives to its Trainer."""
    made: list[Any] = []
    fake = SimpleNamespace(Trainer=lambda strategy, **_: made.append(strategy) or SimpleNamespace(fit=lambda *_: None))
    exec(compile(text, "snippet", "exec"), {"L": fake, "Net": object, "data": None})
    return made[0]


def test_the_after_parts_are_of_the_strategies_that_the_page_names() -> None:
    found = [made_by(text) for text in snippets(PAGE, "python")]
    data, pipeline = SMDDPStrategy, PipelineStrategy
    expected = ["smddp", pipeline, SMDDPFSDPStrategy, data, "smddp_deepspeed_stage_2", pipeline, pipeline, data]
    assert [made if isinstance(made, str) else type(made) for made in found] == expected


def test_both_ways_to_write_smp_are_the_same() -> None:
    (by_hand,) = re.findall(r"It is `(PipelineStrategy\(.*?\))`", PAGE.read_text())
    by_dictionary = made_by(snippets(PAGE, "python")[1])
    assert by_dictionary.options == eval(by_hand, {"PipelineStrategy": PipelineStrategy}).options
    assert type(by_dictionary) is type(from_sagemaker({"mpi": {"enabled": True}}, pipeline_parallel_size=2))
