"""A step without chance: what torch draws is the same for every row, whoever calls for it.

What the step draws behind a seed of its own is no chance, and is drawn.

The dispatcher sees each operation that draws, also those within torch's own functions (attention, recurrent layers,
``gumbel_softmax``), in an ``autograd.Function`` and in a backward pass. Dropout keeps all, and scales it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_smddp._compat.torch import DispatchMode, arguments_by_name, is_composite
from lightning_smddp.pipeline.capture.own_seeds import constant_draws, is_own, seed_torch
from lightning_smddp.pipeline.capture.python_random import generator_devices
from lightning_smddp.wire.pytree import tensors

Given = Mapping[str, Any]  # arguments by name
_DRAWS = torch.Tag.nondeterministic_seeded


@contextmanager
def without_chance(device: torch.device) -> Iterator[None]:
    """Within it torch's random numbers are constants, so that rows do not depend on how many there are.

    A generator that was not seeded by us is the step's own: torch's default ones are seeded here.

    What cuDNN's recurrent layers on CUDA drop stays random: their dropout has a state of its own.
    """
    with torch.random.fork_rng(devices=generator_devices(device)):
        seed_torch(0)
        with constant_draws(), ConstantRandom():
            yield


class ConstantRandom(DispatchMode):
    """What :func:`without_chance` enters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _DRAWS not in function.tags:
            return function(*args, **kwargs)
        if is_composite(function):  # as a whole in inference mode alone, else by its parts
            with self:
                return function.decompose(*args, **kwargs)
        given = arguments_by_name(function, args, kwargs)
        if not is_own(_generator_of(given)):
            return function(*args, **kwargs)
        if given.get("dropout_p"):  # attention in one kernel, which drops inside
            args, kwargs = _without_dropout(given, args, kwargs)
        # It draws all the same: so the result has the right shape and type, and generators go on. Then the result is
        # filled with something else.
        result = function(*args, **kwargs)
        fill = _FILLS.get(function.overloadpacket.__name__)
        if fill is not None:
            fill(result, given)
        return result


def _without_dropout(given: Given, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments ``given`` as they are, with a probability of zero."""
    position = list(given).index("dropout_p")
    if position < len(args):
        args = (*args[:position], 0.0, *args[position + 1 :])
    else:
        kwargs = {**kwargs, "dropout_p": 0.0}
    return args, kwargs


def _generator_of(given: Given) -> torch.Generator:
    """The one that an operation with these arguments draws from."""
    generator = given.get("generator")
    if isinstance(generator, torch.Generator):
        return generator
    # Else torch's default one, of the device that it is asked to make a tensor on, or of its arguments.
    if given.get("device") is not None:
        devices = [torch.device(given["device"])]
    else:
        devices = [tensor.device for tensor in tensors(dict(given))]
    for device in devices:
        if device.type != "cuda":
            continue
        index = device.index
        if index is None:
            index = torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _half(result: Tensor, given: Given) -> None:
    result.fill_(0.5)


def _one(result: Tensor, given: Given) -> None:
    result.fill_(1)


def _normal(result: Tensor, given: Given) -> None:
    value = given["mean"] + 0.5 * given["std"]  # so that the scale counts, too
    result.copy_(torch.as_tensor(value))


def _uniform(result: Tensor, given: Given) -> None:
    middle = (given["from"] + given["to"]) / 2
    result.fill_(middle)


def _integer(result: Tensor, given: Given) -> None:
    # `randint` says low and high, `random_` from and to; without an upper end there is no middle.
    low = given.get("low", given.get("from", 0))
    high = given.get("high", given.get("to"))
    value = low
    if high is not None:
        value = (low + high) // 2
    result.fill_(value)


def _permutation(result: Tensor, given: Given) -> None:
    # Each goes to the next one's place: a row that is compared with itself would not show that rows are mixed.
    order = torch.arange(given["n"])
    result.copy_(order.roll(-1))


def _more_likely(result: Tensor, given: Given) -> None:
    probability = given.get("p")
    if probability is None:  # a tensor with one for each element
        probability = given["self"]
    result.copy_(torch.as_tensor(probability) > 0.5)


def _median(result: Tensor, given: Given) -> None:
    result.fill_(given["median"])


def _log_normal(result: Tensor, given: Given) -> None:
    result.fill_(math.exp(given["mean"]))


def _dropout(result: tuple[Tensor, Tensor], given: Given) -> None:
    output, mask = result
    probability = given["p"]
    if given.get("train", True) and 0.0 < probability < 1.0:
        kept = given.get("input", given.get("self"))
        output.copy_(kept / (1.0 - probability))
        mask.fill_(True)


def _rrelu(result: Tensor, given: Given) -> None:
    if given["training"]:
        slope = (given["lower"] + given["upper"]) / 2
        given["noise"].copy_(torch.where(given["self"] > 0, 1.0, slope))
        result.copy_(given["self"] * given["noise"])


def _likeliest(result: Tensor, given: Given) -> None:
    weights = given["self"]
    if given["replacement"]:
        likeliest = weights.argmax(-1, keepdim=True)
        result.copy_(likeliest.expand(result.shape))
    else:
        result.copy_(weights.topk(given["num_samples"]).indices)


def _as_given(result: Tensor, given: Given) -> None:
    result.copy_(given["self"])


def _rounded(result: Tensor, given: Given) -> None:
    if "self" in given:  # poisson
        mean = given["self"]
    else:
        mean = given["count"] * given["prob"]
    result.copy_(mean.round())


def _share(result: Tensor, given: Given) -> None:
    concentration = given["self"]
    result.copy_(concentration / concentration.sum(-1, keepdim=True))


# By the operator's name in ATen: what a tensor is filled with instead of what was drawn.
_FILLS: dict[str, Callable[[Any, Given], None]] = {
    "rand": _half, "rand_like": _half, "randn": _half, "randn_like": _half,
    "normal": _normal, "normal_": _normal, "uniform_": _uniform,
    "randint": _integer, "randint_like": _integer, "random_": _integer, "randperm": _permutation,
    "bernoulli": _more_likely, "bernoulli_": _one, "exponential_": _one, "geometric_": _one,
    "cauchy_": _median, "log_normal_": _log_normal,
    "native_dropout": _dropout, "_fused_dropout": _dropout, "rrelu_with_noise": _rrelu,
    "multinomial": _likeliest, "poisson": _rounded, "binomial": _rounded,
    "_standard_gamma": _as_given, "_sample_dirichlet": _share,
}  # fmt: skip
