"""What crosses a cut: enough, and no more than needed."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.boundaries import StagePlan, cut_into_stages
from lightning_smddp.pipeline.capture.graph import StepGraph
from tests.pipeline.example_modules import D, Net, graph_of


def item(graph: StepGraph, name: str) -> int:
    return next(i.index for i in graph.nodes if i.name.startswith(name))


def second_stage(graph: StepGraph, name: str) -> StagePlan:
    _, second = cut_into_stages(graph, [item(graph, name)])
    return second


def test_a_residual_sum_crosses_as_one_tensor() -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        for layer in (s.a, s.b, s.c, s.d):
            x = x + layer(x)
        return x.mean()

    graph = graph_of(body)
    for name in ("net.b", "net.c", "net.d"):
        assert [graph.values[v].spec.shape for v in second_stage(graph, name).receives] == [(4, D)]


def test_a_mask_crosses_before_it_is_expanded() -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        mask = s.a(x).mean(-1, keepdim=True)
        wide = mask.expand(-1, D).exp() * torch.ones(8, 1, 1)
        h = s.b(x) * wide
        return s.c(h * wide.sum(0)).mean()

    graph = graph_of(body)
    second = second_stage(graph, "net.b")
    assert [graph.values[v].spec.shape for v in second.receives] == [(4, 1)]
    assert {graph.nodes[i].name.partition(" at")[0] for i in second.recomputed} == {"expand", "exp", "mul"}
    needed = sum(graph.values[value].nbytes for value in graph.needed_after(second.begin))
    assert sum(graph.values[value].nbytes for value in second.receives) < needed


def test_random_values_and_watched_ones_are_sent() -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        small = s.a(x).mean(-1, keepdim=True)
        noisy = torch.nn.functional.dropout(small.expand(-1, D), 0.5)
        watched = small.expand(-1, D) * 2
        watched.register_hook(lambda g: g * 2)
        return (s.b(x) * noisy * watched).mean()

    graph = graph_of(body)
    second = second_stage(graph, "net.b")
    assert len(second.receives) == 2
    assert not second.recomputed
