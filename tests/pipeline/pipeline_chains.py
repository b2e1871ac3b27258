"""A small network in pieces, run by an engine and by one process: the bodies of the engine's tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.records import TensorSpec
from lightning_smddp.pipeline.runtime.engine import PipelineEngine
from lightning_smddp.pipeline.runtime.messages import Boundary
from lightning_smddp.pipeline.runtime.schedules import parse

WIDTH = 6
CPU = torch.device("cpu")
StageBody = Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]]
Batches = list[tuple[Tensor, float]]  # (rows, length, WIDTH) and the weight of each micro-batch


class Piece(nn.Module):
    """One stage. What it sends: hidden, twice the same skip, a mask, positions, a bias made of parameters only."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.stage, self.num_stages = stage, num_stages
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor | None, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.stage == 0:
            assert x is not None
            skip = self.linear(x)
            hidden, mask, positions, bias = skip * 2, x[..., 0] > 0, torch.arange(x.shape[1]), self.bias.exp()
        else:
            hidden, skip, skip_again, mask, positions, bias = received
            hidden = hidden * 0.5 + bias * positions[:, None] + self.bias
            hidden = self.linear(torch.tanh(hidden)).masked_fill(mask[..., None], 0.1) + skip * skip_again
            # the same layer twice: its parameters have two places in the graph
            hidden = self.linear(self.norm(hidden.flatten(0, 1)).view_as(hidden))
        if self.stage < self.num_stages - 1:
            return hidden, skip, skip, mask, positions, bias
        return (hidden.square().mean(),)


class Body:
    """What the engine calls."""

    def __init__(self, piece: Piece, batches: Batches) -> None:
        self.module, self.piece, self.batches = piece, piece, batches
        self.results: list[Tensor] = []

    def __call__(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, weight = self.batches[microbatch]
        outputs = self.piece(x if self.piece.stage == 0 else None, received)
        if len(outputs) > 1:
            return outputs
        self.results.append(outputs[0].detach() * weight)
        return (outputs[0] * weight,)


def network(num_stages: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Piece(stage, num_stages) for stage in range(num_stages))


def batches_of(step: int, sizes: Sequence[int], length: int) -> Batches:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(size, length, WIDTH, generator=generator), size / sum(sizes)) for size in sizes]


def in_one_process(model: nn.ModuleList, batches: Batches, training: bool) -> tuple[list[Tensor], list[Any]]:
    """Losses and boundaries; gradients are accumulated into the model's."""
    losses: list[Tensor] = []
    boundaries = []
    for microbatch in range(len(batches)):
        values: tuple[Tensor, ...] = ()
        row = []
        for piece in model:
            values = Body(piece, batches)(microbatch, values)
            row.append([TensorSpec.of(value) for value in values])
        if training:
            values[0].backward()
        losses.append(values[0].detach())
        boundaries.append(row[:-1])
    return losses, boundaries


def laid_out(boundaries: Sequence[Any], train: bool) -> list[list[Boundary]]:
    return [[Boundary.of(specs, train) for specs in ((), *row, ())] for row in boundaries]


class Engine:
    """An engine with a body for each stage, which keeps the losses."""

    def __init__(self, name: str, bodies: Sequence[StageBody]) -> None:
        self.engine = PipelineEngine(dist.group.WORLD, CPU, parse(name), len(bodies))
        self.bodies = bodies  # of all stages; this rank's are used
        self.stages = [stage.stage_index for stage in self.engine.stages]
        self.losses: dict[int, Tensor] = {}

    def compute(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = self.bodies[stage](microbatch, received)
        if stage == len(self.bodies) - 1 and outputs:
            self.losses[microbatch] = outputs[0].detach()
        return outputs

    def train(self, boundaries: Sequence[Any]) -> list[Tensor]:
        self.losses.clear()
        self.engine.run(self.compute, laid_out(boundaries, True), train=True)
        return [loss for _, loss in sorted(self.losses.items())]

    def evaluate(self, boundaries: Sequence[Any]) -> None:
        self.engine.run(self.compute, laid_out(boundaries, False), train=False)


def differences(engine: Engine, model: nn.ModuleList, reference: nn.ModuleList) -> list[str]:
    """Parameters and buffers of this rank's stages that are not as in ``reference``."""
    found = []
    for stage in engine.stages:
        ours, theirs = model[stage], reference[stage]
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if (mine.grad is None) != (other.grad is None):
                found.append(f"{stage}.{name}.grad: {mine.grad} for {other.grad}")
            elif mine.grad is not None and not torch.allclose(mine.grad, other.grad, rtol=1e-5, atol=1e-6):
                found.append(f"{stage}.{name}.grad: off by {(mine.grad - other.grad).abs().max():.1e}")
        for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            if not torch.allclose(mine, other, rtol=1e-5, atol=1e-6):
                found.append(f"{stage}.{name}: {mine} for {other}")
        if ours.calls != theirs.calls:
            found.append(f"{stage}: {ours.calls} forwards for {theirs.calls}")
    return found


def compare(
    name: str, stages_per_rank: int, steps: Sequence[tuple[str, Sequence[int], int]], frozen: Sequence[int] = ()
) -> list[str]:
    """Run ``steps`` of (mode, sizes of the micro-batches, length) in both ways; what differs."""
    num_stages = dist.get_world_size() * stages_per_rank
    reference = network(num_stages)
    for stage in frozen:
        reference[stage].requires_grad_(False)
    model = copy.deepcopy(reference)
    batches: Batches = []
    bodies = [Body(piece, batches) for piece in model]
    engine, last = Engine(name, bodies), bodies[-1]
    found = []
    for step, (mode, sizes, length) in enumerate(steps):
        batches[:] = batches_of(step, sizes, length)
        reference.train(mode == "train")
        model.train(mode == "train")
        with torch.set_grad_enabled(mode == "train"):
            losses, boundaries = in_one_process(reference, batches, mode == "train")
        returned: list[Tensor] = []
        if mode == "train":
            returned = engine.train(boundaries)
        else:
            with torch.inference_mode():
                engine.evaluate(boundaries)
        if num_stages - 1 in engine.stages:
            results, last.results = last.results, []
            if not torch.allclose(torch.stack(results), torch.stack(losses)):
                found.append(f"step {step}: losses {results} for {losses}")
            if mode == "train" and not torch.equal(torch.stack(results), torch.stack(returned)):
                found.append(f"step {step}: returned {returned} for {results}")
        elif returned:
            found.append(f"step {step}: returned {returned} without the last stage")
        found += [f"step {step} ({mode} {sizes}): {text}" for text in differences(engine, model, reference)]
    return found


class Scripted:
    """A body that is a plain function of (micro-batch, received)."""

    def __init__(self, module: nn.Module, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.module, self.function = module, function

    def __call__(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.function(microbatch, *received)


HIDDEN = TensorSpec((2, 3), torch.float32, True)


def two_stages(
    last: Callable[..., tuple[Tensor, ...]] | None = None, first: Callable[..., tuple[Tensor, ...]] | None = None
) -> list[Scripted]:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    x = torch.randn(2, 3)
    return [
        Scripted(layers[0], first or (lambda microbatch: (layers[0](x * (microbatch + 1)),))),
        Scripted(layers[1], last or (lambda microbatch, hidden: (layers[1](hidden).square().mean(),))),
    ]
