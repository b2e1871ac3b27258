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
        # A step's time grows with the elements: that of the sample says what that of all of them is.
        sample = _sample(values)
        tried, elements = _elements(sample), _elements(values)
        sample_plain_s, sample_fused_s = _step_seconds(optimizer, sample)
        plain_s = sample_plain_s * elements / tried
        fused_s = sample_fused_s * elements / tried
        if plain_s - fused_s > _WORTH_S:
            advice.append(
                f"{type(optimizer).__name__}(..., fused=True) would take {1e3 * fused_s:.1f} ms a step instead of "
                f"{1e3 * plain_s:.1f} ms (of one thread, tried on {tried / 1e6:.2g} of {elements / 1e6:.2g} M elements)"
            )
    return advice


def _elements(values: Sequence[Tensor]) -> int:
    return sum(value.numel() for value in values)


def _could_be_fused(optimizer: Optimizer, values: Sequence[Tensor]) -> bool:
    """Whether one word would make it a fused one, and nobody has written that or another."""
    if type(optimizer) not in _FUSED or not values:
        return False
    for group in optimizer.param_groups:
        if group.get("fused") is not None:
            return False
        # torch refuses the word beside the first and the third; the second one is for CUDA graphs.
        for word in ("foreach", "capturable", "differentiable"):
            if group.get(word):
                return False
    for value in values:
        is_plain = type(value) in (Tensor, nn.Parameter)
        if not is_plain or not value.is_floating_point():
            return False
        if value.device != values[0].device:
            return False
    return True


def _sample(values: Sequence[Tensor]) -> list[Tensor]:
    """The first ones, as large as they are, as it matters which fit into caches; the last one may be cut."""
    sample: list[Tensor] = []
    room = _MOST
    for value in values:
        if room > 0:
            flat = value.detach().reshape(-1)
            sample.append(flat[:room])
            room -= value.numel()
    return sample


def _step_seconds(optimizer: Optimizer, values: Sequence[Tensor]) -> tuple[float, float]:
    """Of a step on copies of ``values``, as it is and fused: the best of some that take turns."""
    plain = _trial(optimizer, values, None)
    fused = _trial(optimizer, values, True)
    device = values[0].device
    plain_s = fused_s = float("inf")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for each other where ranks share the cores, and that takes time, too
    # In turns, as what else the machine does slows down both then, and the best of each, as it slows down some more.
    try:
        for _ in range(_STEPS):  # the first one makes the states
            plain_s = min(plain_s, _seconds(plain, device))
            fused_s = min(fused_s, _seconds(fused, device))
    finally:
        torch.set_num_threads(threads)
    return plain_s, fused_s


def _trial(optimizer: Optimizer, values: Sequence[Tensor], fused: bool | None) -> Optimizer:
    """Another ``optimizer`` with the same arguments but ``fused``, on copies of ``values`` that have gradients."""
    known = inspect.signature(type(optimizer).__init__).parameters
    arguments = {key: value for key, value in optimizer.defaults.items() if key in known}
    arguments["fused"] = fused
    parameters = []
    for value in values:
        parameter = nn.Parameter(value.clone())
        parameter.grad = torch.full_like(parameter, 1e-3)
        parameters.append(parameter)
    make: Any = type(optimizer)
    trial: Optimizer = make(parameters, **arguments)
    return trial


def _seconds(optimizer: Optimizer, device: torch.device) -> float:
    """Of one step, see :func:`_now`."""
    begin = _now(device)
    optimizer.step()
    return _now(device) - begin


def _now(device: torch.device) -> float:
    """Seconds: of this process on a CPU, as other ranks may share its cores; else of the clock, behind the device."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
