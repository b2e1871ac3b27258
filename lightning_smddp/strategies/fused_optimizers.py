"""What torch's fused optimizers would save, measured on a copy of a part of the parameters.

On a CPU the default implementations of torch's optimizers pass over memory once for each operation; with ``fused=True``
it is one pass. Their default stays the slower one there, so the table at the start says what the word would save.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

_FUSED = (Adam, AdamW, SGD)
_MOST = 2**22  # elements that are stepped: larger than caches, some milliseconds
_STEPS = 4
_WORTH_S = 5e-4  # a step


def fused_advice(module: nn.Module, stepped: Sequence[tuple[Optimizer, Sequence[Tensor]]]) -> list[str]:
    """For each optimizer that is not fused and could be: how long a step takes a rank, and would take.

    Args:
        module: with the parameters. Fused optimizers take no sparse gradients, which its layers may make.
        stepped: each optimizer with what this rank steps: parameters, or parts of them.
    """
    if any(getattr(layer, "sparse", False) for layer in module.modules()):
        return []
    advice = []
    for optimizer, values in stepped:
        if not _could_be_fused(optimizer, values):
            continue
        sample = _sample(values)
        plain, fused = _step_seconds(optimizer, sample)
        tried, elements = _elements(sample), _elements(values)
        plain, fused = plain * elements / tried, fused * elements / tried
        if plain - fused > _WORTH_S:
            advice.append(
                f"{type(optimizer).__name__}(..., fused=True) would take {1e3 * fused:.1f} ms a step instead of "
                f"{1e3 * plain:.1f} ms (of one thread, tried on {tried / 1e6:.2g} of {elements / 1e6:.2g} M elements)"
            )
    return advice


def _elements(values: Sequence[Tensor]) -> int:
    return sum(value.numel() for value in values)


def _could_be_fused(optimizer: Optimizer, values: Sequence[Tensor]) -> bool:
    """Whether one word would make it a fused one, and nobody has written that or another."""
    if type(optimizer) not in _FUSED or not values:
        return False
    for group in optimizer.param_groups:
        others = any(group.get(word) for word in ("foreach", "capturable", "differentiable"))
        if others or group.get("fused") is not None:
            return False
    plain = all(type(value) in (Tensor, nn.Parameter) and value.is_floating_point() for value in values)
    return plain and all(value.device == values[0].device for value in values)


def _sample(values: Sequence[Tensor]) -> list[Tensor]:
    """The first ones, as large as they are, as it matters which fit into caches; the last one may be cut."""
    sample: list[Tensor] = []
    room = _MOST
    for value in values:
        if room > 0:
            sample.append(value.detach().reshape(-1)[:room])
            room -= value.numel()
    return sample


def _step_seconds(optimizer: Optimizer, values: Sequence[Tensor]) -> tuple[float, float]:
    """Of a step on copies of ``values``, as it is and fused: the best of some that take turns."""
    known = inspect.signature(type(optimizer).__init__).parameters
    words = {key: value for key, value in optimizer.defaults.items() if key in known}
    trials: list[Optimizer] = []
    for fused in (None, True):
        parameters = [nn.Parameter(part.clone()) for part in values]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        make: Any = type(optimizer)
        trials.append(make(parameters, **{**words, "fused": fused}))
    best = [float("inf"), float("inf")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for each other where ranks share the cores, and that takes time, too
    try:
        for _ in range(_STEPS):  # the first one makes the states
            for number, trial in enumerate(trials):
                begin = _now(values[0].device)
                trial.step()
                best[number] = min(best[number], _now(values[0].device) - begin)
    finally:
        torch.set_num_threads(threads)
    return best[0], best[1]


def _now(device: torch.device) -> float:
    """Seconds: of this process on a CPU, as other ranks may share its cores; else of the clock, behind the device."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
