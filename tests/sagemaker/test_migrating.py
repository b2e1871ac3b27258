"""The *after* parts of ``docs/migrating.md`` train, on two ranks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_smddp import PipelineStrategy, from_sagemaker
from tests.ranks import run_trainer_ranks
from tests.sagemaker.sdk_requests import HERE
from tests.strategies.learners import Learner, make_trainer
from tests.test_readme import snippets

PAGE = HERE.parent.parent / "docs" / "migrating.md"
OURS = {"devices", "num_nodes", "max_epochs"}  # the page's numbers are those of a cluster


class Net(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Linear(3, 3))


def run_all(texts: list[str]) -> list[str]:
    """Run every snippet, with a quiet Trainer for the ranks that there are: the strategies' classes."""
    strategies: list[str] = []

    def trainer(strategy: Any, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if name not in OURS}
        made = make_trainer(strategy, **{"max_steps": 2, **kept})
        strategies.append(type(made.strategy).__name__)
        return made

    for text in texts:
        loader = torch.utils.data.DataLoader(Learner().train_dataloader().dataset, batch_size=16)
        names: dict[str, Any] = {"L": SimpleNamespace(Trainer=trainer), "Net": Net, "data": loader}
        exec(compile(text, "snippet", "exec"), names)
    return strategies


@pytest.mark.slow
def test_the_after_parts_train() -> None:
    texts = snippets(PAGE, "python")
    found = run_trainer_ranks(run_all, 2, texts, timeout=110)
    assert found[0] == found[1]
    data, pipeline, deepspeed = "SMDDPStrategy", "PipelineStrategy", "SMDDPDeepSpeedStrategy"
    fsdp = "SMDDPFSDPStrategy"
    assert found[0] == [data, pipeline, fsdp, data, deepspeed, pipeline, pipeline, data]


def test_both_ways_to_write_smp_are_the_same() -> None:
    by_dictionary = snippets(PAGE, "python")[1]
    (by_hand,) = re.findall(r"It is `(PipelineStrategy\(.*?\))`", PAGE.read_text())
    made: list[Any] = []
    trainer = SimpleNamespace(fit=lambda *_: None)
    fake = SimpleNamespace(Trainer=lambda strategy, **_: made.append(strategy) or trainer)
    exec(compile(by_dictionary, "snippet", "exec"), {"L": fake, "Net": object, "data": None})
    first, second = made[0].options, eval(by_hand, {"PipelineStrategy": PipelineStrategy}).options
    assert first == second
    assert type(made[0]) is type(from_sagemaker({"mpi": {"enabled": True}}, pipeline_parallel_size=2))
