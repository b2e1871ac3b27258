"""Random numbers of a step follow from its seed and from which modules draw, whoever runs them."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_smddp.seeding import Generators, drawing_candidates, mix, seeded, seeded_modules, step_seed

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.plain = nn.Linear(4, 4)
        self.last = nn.Dropout(0.5)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.3)
        return self.last(self.plain(x)) + torch.rand(4, generator=self.generator) + random.random() + np.random.rand()


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    net, x = Net(), torch.ones(3, 4)
    generators = Generators(net, CPU)
    results = []
    with seeded_modules(net, generators):
        for number in (1, 1, 2):
            generators.seed(number)
            results.append(net(x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert "forward" not in vars(net.last)


def test_who_runs_the_last_module_alone_draws_what_the_whole_does() -> None:
    net, x = Net(), torch.ones(3, 4)
    seen: list[Tensor] = []
    net.last.register_forward_hook(lambda module, args, result: seen.append(args[0]) or seen.append(result))
    generators = Generators(net, CPU)
    with seeded_modules(net, generators):
        generators.seed(7)
        net(x)
    # A part knows which modules draw, or come behind draws: `first`, and `plain` behind `F.dropout`.
    generators.seed(7)
    seeded(generators, lambda: None)
    seeded(generators, lambda: None)
    assert torch.equal(seeded(generators, lambda: F.dropout(seen[0], 0.5)), seen[1])


def test_what_is_drawn_inside_counts_for_nothing_outside() -> None:
    net = Net()
    generators = Generators(net, CPU)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    with generators.preserved():
        generators.seed(5)
        net(torch.ones(4))
    assert torch.equal(torch.rand(3), expected)


def test_compiled_modules_are_not_looked_into() -> None:
    net = nn.ModuleDict({"a": nn.Sequential(nn.Dropout()), "b": nn.Sequential(nn.Dropout())})
    net["a"].compile(backend="eager")
    assert drawing_candidates(net) == ["a", "b", "b.0"]


def test_seeds_differ_by_hook_epoch_batch_and_micro_batch() -> None:
    seeds = {
        mix(step_seed(1, hook, epoch, batch), index)
        for hook in ("training_step", "validation_step")
        for epoch in range(2)
        for batch in range(3)
        for index in range(4)
    }
    assert len(seeds) == 48
