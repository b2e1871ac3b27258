"""Whether a checkpoint fits a model and its optimizers, before either is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp._compat.torch import loadable_names
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.wording import counted

Shape = tuple[int, ...]
_SHOWN = 10  # names of one kind in a message
# What torch's optimizers keep for each element of a parameter, so in its shape.
_STATE_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "sum")
_FIX = "Build the model and its optimizers with the arguments that the checkpoint was saved with, or use another one."


@dataclass(frozen=True)
class OptimizerOutline:
    """An optimizer of the whole model.

    Attributes:
        name: Of its class.
        groups: For each parameter group the shapes of its parameters, in order; None where one is unknown.
        options: Names that each of its groups needs.
    """

    name: str
    groups: list[list[Shape | None]]
    options: frozenset[str]

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerOutline:
        """Of an optimizer that holds all of its parameters."""
        groups = []
        for group in optimizer.param_groups:
            groups.append([_shape(parameter) for parameter in group["params"]])
        return cls(type(optimizer).__name__, groups, needed_options(optimizer))


def needed_options(optimizer: Optimizer) -> frozenset[str]:
    """Options with numbers, such as ``betas``. Others come and go with torch's versions and have fallbacks."""
    needed = set()
    for name, value in optimizer.defaults.items():
        is_number = isinstance(value, (int, float, tuple, Tensor)) and not isinstance(value, bool)
        if is_number:
            needed.add(name)
    return frozenset(needed)


def check_compatibility(
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    strict: bool = True,
    path: str = "the checkpoint",
) -> None:
    """Compare a Trainer's checkpoint with the model and the optimizers it is meant for; changes nothing.

    Names that a submodule loads by code or hooks of its own are left to it.

    Args:
        checkpoint: with ``state_dict`` and maybe ``optimizer_states``.
        module: with all parameters, on any device, ``meta`` too.
        optimizers: of all parameters; none where they will not be restored.
        strict: as of ``load_state_dict``: False allows missing and unexpected names.
        path: for the message.

    Raises:
        CheckpointError: it lists missing, unexpected and differing names, and which optimizer differs how.
    """
    problems = []
    names = loadable_names(module)
    if names is not None:  # else the module loads by a method of its own, which alone knows what it needs
        expected, exempt = names
        shapes = {name: _shape(tensor) for name, tensor in expected.items()}
        problems += compare_states(shapes, checkpoint["state_dict"], strict, tuple(exempt))
    outlines = [OptimizerOutline.of(optimizer) for optimizer in optimizers]
    if outlines and "optimizer_states" in checkpoint:
        problems += compare_optimizers(outlines, checkpoint["optimizer_states"])
    require_none(problems, path)


def require_none(problems: Sequence[str], path: str) -> None:
    """Raise ``CheckpointError`` if there are problems of :func:`compare_states` or :func:`compare_optimizers`."""
    if problems:
        reason = "; ".join(problems)
        raise CheckpointError(path, f"does not fit: {reason}", _FIX)


def compare_states(
    expected: Mapping[str, Shape | None],
    state: Mapping[str, Any],
    strict: bool = True,
    exempt: tuple[str, ...] = (),
) -> list[str]:
    """What is wrong with ``state`` for a model with the names and shapes ``expected``; empty if nothing.

    Args:
        expected: name -> shape, or None if any will do.
        state: name -> tensor, or anything else where the shape does not matter.
        strict: whether names may not be missing or unexpected.
        exempt: beginnings of names that are not compared.
    """
    differing = []
    missing = []
    for name, shape in expected.items():
        if name.startswith(exempt):  # its submodule alone knows what it needs
            continue
        if name not in state:
            missing.append(name)
            continue
        saved = _shape(state[name])
        if not _interchangeable(shape, saved):
            differing.append(_differs(name, saved, shape))
    unexpected = [name for name in state if name not in expected and not name.startswith(exempt)]
    problems = _listed("of another shape", differing)
    if strict:
        problems += _listed("missing in the checkpoint", missing)
        problems += _listed("not in the model", unexpected)
    return problems


def compare_optimizers(outlines: Sequence[OptimizerOutline], states: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with saved optimizer states for these optimizers; empty if nothing."""
    if len(outlines) != len(states):
        saved = counted(len(states), "optimizer")
        return [f"it has the states of {saved}, the model has {len(outlines)}"]
    problems = []
    for index, outline in enumerate(outlines):
        found = _compare_optimizer(outline, states[index])
        problems += [f"optimizer {index} ({outline.name}): {problem}" for problem in found]
    return problems


def _compare_optimizer(outline: OptimizerOutline, state: Mapping[str, Any]) -> list[str]:
    groups = state["param_groups"]
    saved = [len(group["params"]) for group in groups]
    wanted = [len(shapes) for shapes in outline.groups]
    if saved != wanted:
        theirs = _some(saved)
        ours = _some(wanted)
        return [f"the checkpoint has parameter groups of {theirs} parameters, the model of {ours}"]
    # An optimizer's state knows its parameters by number, which its groups list in the order of the model's parameters.
    missing: set[str] = set()
    shape_of: dict[Any, Shape | None] = {}
    for group, shapes in zip(groups, outline.groups, strict=True):
        missing |= outline.options - set(group)
        shape_of.update(zip(group["params"], shapes, strict=True))
    if missing:
        names = ", ".join(sorted(missing))
        return [f"it was saved by another kind of optimizer, without {names}"]
    differing = []
    for number, values in state["state"].items():
        shape = shape_of.get(number)
        if shape is None or not isinstance(values, Mapping):
            continue
        for key, value in values.items():
            if key not in _STATE_LIKE_PARAMETER:
                continue
            found = _shape(value)
            if found and found != shape:  # `()` is a number's, such as a count of steps
                differing.append(_differs(f"{key} of parameter {number}", found, shape))
    return _listed("state of another shape", differing)


def _differs(what: str, saved: Shape | None, wanted: Shape | None) -> str:
    found = list(saved or ())
    needed = list(wanted or ())
    return f"{what} is {found} in the checkpoint and {needed} in the model"


def _interchangeable(wanted: Shape | None, saved: Shape | None) -> bool:
    """Whether a tensor of the shape ``saved`` can be loaded where ``wanted`` is needed; None is any shape."""
    if wanted is None or saved is None or wanted == saved:
        return True
    return wanted == () and saved == (1,)  # old versions of torch saved a scalar as one element


def _shape(value: Any) -> Shape | None:
    """None for what is no tensor, or has no shape yet."""
    if not isinstance(value, Tensor):
        return None
    if isinstance(value, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return None
    # DeepSpeed's third stage leaves a parameter empty, with its shape beside it.
    return tuple(getattr(value, "ds_shape", value.shape))


def _listed(what: str, found: list[str]) -> list[str]:
    """At most one problem: how many were ``found``, and the first ones."""
    if not found:
        return []
    return [f"{what} ({len(found)}): {_some(found)}"]


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:_SHOWN])
    if len(values) > _SHOWN:
        shown += f" and {len(values) - _SHOWN} more"
    return shown
