"""A module's and its optimizer's state, whole and by parameter as torch saves them, out of DeepSpeed and into it.

DeepSpeed joins the parameters of a group in one flat tensor, of which each rank has a part in fp32 and its optimizer's
state (ZeRO, Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054). Stage 3 cuts each parameter; the stages before
cut the flat tensor. ``deepspeed.utils.safe_get_full_*`` put a parameter together again, one at a time.

Methods named ``whole_*`` are collective: all ranks call them, and the first one gets what they collect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.pytree import copied
from lightning_smddp.sharding.optimizer_states import numbered, require_same_sizes


def parameter_groups(optimizer: Optimizer | None, module: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each group, before DeepSpeed puts flat tensors in their place.

    Without an ``optimizer`` DeepSpeed makes one from its configuration, for all that is trained.
    """
    if optimizer is None:
        return [[p for p in module.parameters() if p.requires_grad]]
    return [list(group["params"]) for group in optimizer.param_groups]


class WholeStates:
    """States of a module that DeepSpeed trains, by parameter.

    Args:
        module: its parameters have the names of the checkpoint.
        optimizer: DeepSpeed's, of stage 1, 2 or 3, around torch's; None where nothing is trained.
        groups: of all parameters, see :func:`parameter_groups`.
        keeps: whether this rank gets what is collected.
    """

    def __init__(
        self, module: nn.Module, optimizer: Any, groups: Sequence[Sequence[nn.Parameter]], keeps: bool
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.groups = groups
        self.keeps = keeps
        # By `id` of a parameter that is trained.
        self._flat_of = {id(parameter): flat for flat, members in self._flat_tensors() for parameter in members}

    def _flat_tensors(self) -> Iterator[tuple[Tensor, Sequence[nn.Parameter]]]:
        """This rank's part of each flat tensor in fp32, and the parameters that are in the whole of it."""
        # These are attributes of DeepSpeed's own optimizers, of other names in stage 3 than before it.
        zero = self.optimizer
        if zero is None:
            return
        if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
            yield from zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        else:
            yield from zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)

    # ---- out of DeepSpeed ----

    def whole_module_state(self) -> dict[str, Any]:
        """As ``module.state_dict()``, on the CPU: parameters that are trained in another precision are in fp32."""
        state: dict[str, Any] = self.module.state_dict()
        wholes = {id(parameter): self._whole_parameter(parameter) for parameter in self.module.parameters()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = wholes[id(parameter)]
        if not self.keeps:
            return {}
        return state

    def _whole_parameter(self, parameter: nn.Parameter) -> Tensor | None:
        from deepspeed.utils import safe_get_full_fp32_param

        # Of a parameter that is cut, or in 16 bits, the fp32 copy that is stepped has what training has made of it. Any
        # other parameter has that itself.
        is_copied = _is_cut(parameter) or parameter.dtype != torch.float32
        if id(parameter) in self._flat_of and is_copied:
            return self._kept(safe_get_full_fp32_param(parameter))
        with _gathered(parameter):
            return self._kept(parameter)

    def _kept(self, value: Tensor) -> Tensor | None:
        """A copy that belongs to the checkpoint, on the rank that saves it."""
        if not self.keeps:
            return None
        return value.detach().to("cpu", copy=True)

    def whole_optimizer_state(self) -> dict[str, Any]:
        """As ``state_dict()`` of the optimizer without DeepSpeed: states by the running number of a parameter."""
        self._link_states()
        states: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(chain.from_iterable(self.groups)):
            entries = self._whole_entries(parameter)
            if entries:
                states[number] = entries
        if not self.keeps:
            return {}
        # DeepSpeed has put flat tensors in the parameters' place; a group's other options are still the user's.
        flat_groups = self.optimizer.optimizer.param_groups
        groups = [{**flat, "params": members} for flat, members in zip(flat_groups, self.groups, strict=True)]
        return {"state": states, "param_groups": numbered(groups)}

    def _whole_entries(self, parameter: nn.Parameter) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        flat = self._flat_of.get(id(parameter))
        if flat is None:  # frozen
            return {}
        # Of the flat tensor's state, what has a number for each element is cut by parameters; a count holds for all of
        # them.
        entries: dict[str, Any] = {}
        for key, value in self.optimizer.optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                entries[key] = self._kept(safe_get_full_optimizer_state(parameter, key))
            elif isinstance(value, Tensor):
                entries[key] = self._kept(value)
            else:
                entries[key] = value
        return entries

    # ---- into DeepSpeed ----

    def load_module_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load what :meth:`whole_module_state` or any Trainer has saved; every rank has it. Collective.

        Raises:
            RuntimeError: as ``load_state_dict``.
        """
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        cut = {name for name, parameter in parameters.items() if _is_cut(parameter)}
        # Parameters of which each rank has a part are empty here: first they are given to themselves.
        given = {name: parameters[name] if name in cut else value for name, value in state.items()}
        self.module.load_state_dict(given, strict=strict)
        # One of them is whole at a time. What the first rank writes to it is cut again when the context ends.
        for name, parameter in self.module.named_parameters():
            if name in cut and name in state:
                if state[name].shape != _shape(parameter):
                    raise RuntimeError(f"{name} is of another shape in the checkpoint: {tuple(state[name].shape)}.")
                with torch.no_grad(), _gathered(parameter, modifier_rank=0):
                    parameter.copy_(state[name])
            if id(parameter) in self._flat_of:  # the copy in fp32 is what the optimizer steps
                value = state.get(name)
                if value is None:  # a hook may have loaded the parameter
                    with _gathered(parameter):
                        value = parameter.detach().clone()
                self._set(parameter, value, None)

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Load what :meth:`whole_optimizer_state`, or the optimizer without DeepSpeed, has saved.

        Raises:
            ValueError: the groups differ, or the parameters of one were not stepped together.
        """
        base = self.optimizer.optimizer
        groups = saved["param_groups"]
        require_same_sizes(groups, self.groups)
        entries_of: dict[int, Mapping[str, Any]] = {}
        for flat_group, members, group in zip(base.param_groups, self.groups, groups, strict=True):
            flat_group.update({**group, "params": flat_group["params"]})
            for parameter, number in zip(members, group["params"], strict=True):
                entries_of[id(parameter)] = saved["state"].get(number, {})

        # First the flat states, zero, where each rank then finds its part of a parameter's, which is written to it.
        for flat, inside in self._flat_tensors():
            self._make_entries(base.state, flat, inside, entries_of)
        self._link_states()
        for _, inside in self._flat_tensors():
            for parameter in inside:
                for key, value in entries_of[id(parameter)].items():
                    if _is_elementwise(value, parameter):
                        self._set(parameter, value, key)

    def _make_entries(
        self, state: Any, flat: Tensor, inside: Sequence[nn.Parameter], entries_of: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Give a flat tensor the states that its parameters have, zero, and the numbers that they have in common."""
        shared: list[dict[str, Any]] = []
        for parameter in inside:
            numbers = dict(entries_of[id(parameter)])
            for key, value in entries_of[id(parameter)].items():
                if _is_elementwise(value, parameter):
                    state[flat].setdefault(key, torch.zeros_like(flat))
                    del numbers[key]
            state[flat].update(copied(numbers))
            shared.append(numbers)
        # One flat tensor has one count of steps, so all parameters in it need the same.
        others = [numbers for numbers in shared if numbers != shared[0]]
        if others:
            raise ValueError(
                "The optimizer's state cannot be loaded: DeepSpeed steps the parameters of a group together, and here "
                f"one has {shared[0]} and another {others[0]}. Put them into parameter groups of their own, "
                "or load the weights alone, into the module before `fit`."
            )

    def _set(self, parameter: Any, value: Tensor, key: str | None) -> None:
        """Write this rank's part of a whole ``value`` to the fp32 parameter (None) or to a state of the optimizer."""
        # What `deepspeed.utils.safe_set_full_*` and `safe_set_local_*` do for a parameter that is trained.
        value = value.to(parameter.device, torch.float32)
        if _is_cut(parameter):
            self.optimizer.set_local_hp_param(_part_of(value, parameter), parameter, key)
        else:
            parameter.set_full_hp_param(value, key)

    def _link_states(self) -> None:
        """Stages 1 and 2: show ``safe_get_full_optimizer_state`` where each parameter's part of a flat state is.

        DeepSpeed does so when the first of several groups has stepped, and finds no state of the others then.
        """
        for flat, members in self._flat_tensors():
            state = self.optimizer.optimizer.state.get(flat, {})
            for parameter in members:
                mapping = getattr(parameter, "_hp_mapping", None)  # None: this rank has nothing of the parameter
                if mapping is not None:
                    mapping.set_optim_state_fragment(flat, state)


def _is_cut(parameter: nn.Parameter) -> bool:
    """Whether each rank has a part of it, as stage 3 does it."""
    return hasattr(parameter, "ds_id")


def _gathered(parameter: nn.Parameter, modifier_rank: int | None = None) -> Any:
    """In this context a cut parameter is whole; what ``modifier_rank`` writes then is everyone's. Collective."""
    from deepspeed import zero

    return zero.GatheredParameters([parameter], modifier_rank=modifier_rank, enabled=_is_cut(parameter))


def _is_elementwise(value: Any, parameter: nn.Parameter) -> bool:
    """Whether a state has a number for each element, such as a momentum; others are numbers for all of them."""
    return isinstance(value, Tensor) and bool(value.shape == _shape(parameter))


def _shape(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "ds_shape", parameter.shape)  # stage 3 leaves a parameter empty


def _part_of(value: Tensor, parameter: Any) -> Tensor:
    """This rank's part of a whole value, as stage 3 cuts parameters: equal parts, the last one filled up with zeros."""
    size = parameter.ds_tensor.ds_numel
    start = torch.distributed.get_rank() * size
    piece = value.reshape(-1)[start : start + size]
    part = value.new_zeros(size)
    part[: piece.numel()] = piece
    return part
