"""What Python code reads of a batch is asked once, however many stages and rehearsals run the code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_smddp.pipeline.partition.microbatches import split as split_batch
from lightning_smddp.pipeline.runtime.host_values import NOTHING, Answers
from lightning_smddp.pipeline.runtime.remote import Shapes
from lightning_smddp.pipeline.runtime.replay import patched_units
from tests.pipeline.stage_emulation import split

X, MASK = torch.ones(3, 4), torch.tensor([True, False, True])


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = mask.nonzero()[:, 0].tolist()
        rows.append(0)  # a list of its own each time
        y = self.a(x[rows])
        if mask.any().item():
            y = y * mask.sum().item()
        return self.b(y).sum()


class Asked(TorchFunctionMode):
    """Counts what is really called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[getattr(function, "__name__", "")] += 1
        return function(*args, **(kwargs or {}))


def test_stages_ask_once() -> None:
    root = nn.Module()
    root.net = Reading()
    graph, replays = split(root, lambda: root.net(X, MASK), lambda name: name != "net", 2)
    answers, asked = Answers(), Asked()
    for mask in (MASK, MASK):  # a second pass, as a rehearsal is one
        received: Any = ()
        for replay in replays:
            with asked, patched_units(root, graph.units), torch.no_grad():
                received, result = replay.run(
                    lambda mask=mask: root.net(X, mask), received, Shapes.of(graph), answers=answers
                )
    assert (asked.calls["tolist"], asked.calls["item"]) == (1, 2)
    torch.testing.assert_close(result, root.net(X, MASK))


def test_another_question_gets_no_answer() -> None:
    answers, x = Answers(), torch.ones(2)
    assert answers.note(0, Tensor.item, ((x,), {}), 1.0)
    assert answers.note(1, Tensor.tolist, ((x,), {}), [1.0, 2.0])
    assert answers.find(1, Tensor.tolist, ((x,), {})) == [1.0, 2.0]
    assert answers.find(0, Tensor.tolist, ((x,), {})) is NOTHING
    assert answers.find(0, Tensor.item, ((torch.ones(3),), {})) is NOTHING
    assert not answers.note(0, Tensor.__setitem__, ((x, 0, 1.0), {}), None)
    assert answers.note(0, Tensor.item, ((torch.ones(3),), {}), 2.0)
    assert answers.find(1, Tensor.tolist, ((x,), {})) is NOTHING


def test_a_changed_copy_has_no_answers() -> None:
    (part, _) = split_batch(X.repeat(2, 1), 2)
    part.answers.note(0, Tensor.item, ((X,), {}), 1.0)
    changed = replace(part, value=X)
    assert changed.answers.find(0, Tensor.item, ((X,), {})) is NOTHING
