"""A module whose parameters, gradients and optimizer states are divided among ranks, by torch's FSDP2.

A unit's parameters are gathered before its ``forward`` and before its backward pass, and freed behind them; its
gradients are averaged and divided again behind its backward pass. The root has all other parameters, which are whole
from the begin of a step to the end of its backward pass. Outside of steps all parameters are ``DTensor`` objects, of
which each rank has its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.hooks import RemovableHandle

from lightning_smddp._compat.fsdp import (
    forward_of,
    hold_memory,
    match_trained,
    parameters_of,
    parts,
    start,
    undo,
    watch_loss,
    whole_parameters,
)
from lightning_smddp._compat.torch import swap_contents
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.tensors import broadcast_tensors, from_numbers
from lightning_smddp.sharding.units import Units, places

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class ShardingPlan:
    """How a module is divided.

    Attributes:
        mesh: of the ranks: of one dimension, or of two, where ranks of the second one share a copy.
        reshard: units are freed between their forward and their backward pass.
        unit_precision: of the units' parameters in forward and backward, and of the sums of gradients.
        root_precision: the same of all other parameters.
        offload: where shards are.
        fill: gives values to parameters of these names that are on the meta device, whole.
    """

    mesh: DeviceMesh
    reshard: bool
    unit_precision: MixedPrecisionPolicy
    root_precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    fill: Callable[[Sequence[str]], None]


class FullySharded:
    """Divides ``root`` among the ranks of a mesh, until :meth:`close`. Collective.

    Args:
        root: with equal parameters on all ranks, or parameters on the meta device.
        units: see :func:`~lightning_smddp.sharding.units.find_units`.
        plan: how.

    Attributes:
        replicated: parameters that all ranks have: those without dimensions cannot be divided, and in 16 bits those of
            BatchNorm, which is computed in 32, as its averages are.
        synchronizes: gradients are averaged in the next backward pass.

    Raises:
        ValueError: there is something in ``root`` that would be lost, such as hooks on its parameters.
    """

    def __init__(self, root: nn.Module, units: Units, plan: ShardingPlan) -> None:
        self.root = root
        self.units = units
        self.plan = plan
        self._originals = dict(root.named_parameters())  # what is tied has one name here, and several places
        self._places = places(root)
        _require_dividable(self._originals)
        in_32_bits = _BATCH_NORMS if plan.unit_precision.param_dtype else ()
        norms = {id(parameter) for module, _, parameter in self._places if isinstance(module, in_32_bits)}
        self.replicated = {name: p for name, p in self._originals.items() if p.dim() == 0 or id(p) in norms}
        self._names = {id(parameter): name for name, parameter in self._originals.items()}
        # Inner units before the outer ones, the root last: FSDP2 gives a module the parameters that no module inside it
        # has taken.
        self._modules = [self._divide(root.get_submodule(name), plan.unit_precision) for name in reversed(units.names)]
        self._root = self._divide(root, plan.root_precision)
        self._modules.append(self._root)
        self._used: set[str] = set()  # parameters with a gradient since the last average
        self._had: set[str] = set()  # and those that had one, of an earlier average
        self._noted: set[str] = set()  # those whose whole tensors tell of their gradients
        self.synchronizes = True
        start(root)
        self._parameters = parameters_of(root)
        self._in_step = False
        self._holds = False
        self._handles: list[RemovableHandle] = []
        for name, parameter in root.named_parameters():
            if parameter.requires_grad and name not in self.replicated:  # a use outside of its unit ends here
                self._handles.append(parameter.register_hook(partial(self._note, name)))

    def _divide(self, module: nn.Module, precision: MixedPrecisionPolicy) -> FSDPModule:
        # Parameters of units in it are other objects since they were divided, so they have no name here.
        own = {self._names[id(p)]: p for p in module.parameters() if id(p) in self._names}
        self.plan.fill(list(own))
        for parameter in own.values():
            if not parameter.is_contiguous():  # as FSDP2 needs it; a layout in memory is no part of the values
                parameter.data = parameter.data.contiguous()
        divided = fully_shard(
            module,
            mesh=self.plan.mesh,
            reshard_after_forward=self.plan.reshard or module is self.root,
            mp_policy=precision,
            offload_policy=self.plan.offload,
            ignored_params=set(self.replicated.values()),
        )
        # Ranks may use different parameters of a unit: all average the same ones, see `after_backward`.
        divided.set_reduce_scatter_unused_params(True, recurse=False)
        for name, parameter in own.items():
            if name not in self.replicated:
                # Whoever still has this object would keep the whole in memory, and compute with it to no effect.
                swap_contents(parameter, torch.empty_like(parameter, device="meta"))
        return divided

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that have one copy of everything among them."""
        return self.plan.mesh.get_group(self.plan.mesh.ndim - 1)

    # ---- steps ----

    @contextmanager
    def step(self, trains: bool) -> Iterator[None]:
        """Around a step of the user's: the root's parameters are whole in it, and till the end of its backward pass.

        Args:
            trains: a backward pass may follow. Else parameters are divided again at the end.
        """
        self._match_trained()
        self.hold_memory(trains and not self.plan.reshard and self.plan.mesh.device_type == "cpu")
        self._in_step = True
        self._keep_whole(root=True, units=trains and not self.plan.reshard)
        try:
            with forward_of(self.root):
                yield
        finally:
            self._in_step = False
            self._keep_whole(root=False, units=False)
        if not trains:
            self.reshard()

    def hold_memory(self, on: bool) -> None:
        """Whether divided parameters keep the memory in which they were whole, for the next step.

        A CPU's memory that is given back and taken again is zeroed by the kernel, page by page: for all units that
        costs more than their gathering.
        """
        if on == self._holds:
            return
        self._holds = on
        self.reshard()
        hold_memory(self.root, on)

    def watch_calls(self) -> None:
        """For steps that do backward passes themselves: what they call behind one is whole again, and frozen or not.

        FSDP2 divides the root's parameters again behind each backward pass, for the optimizer.
        """
        for module, parameters in self._parameters.items():
            if module is not self.root:
                hook = partial(self._before_call, parameters)
                self._handles.append(module.register_forward_pre_hook(hook))

    def _before_call(self, parameters: Sequence[Any], *_: Any) -> None:
        if self._in_step:
            self._root.unshard()
            match_trained(parameters)

    def _keep_whole(self, root: bool, units: bool) -> None:
        """Whether the root and the units stay whole behind their forward passes."""
        for module in self._modules:
            keeps = root if module is self._root else units
            module.set_reshard_after_forward(not keeps, recurse=False)

    def before_backward(self, loss: Tensor, watches: bool = True) -> None:
        """The root's gradients are averaged when the backward pass of ``loss`` ends.

        Args:
            loss: what is differentiated.
            watches: whatever was returned. Else if it begins at tensors that the root's ``forward`` has returned.
        """
        self._match_trained()
        if watches:
            watch_loss(self.root, loss)
        for name, parameter in whole_parameters(self.root):
            if parameter.requires_grad and name not in self._noted:
                self._noted.add(name)
                parameter.register_post_accumulate_grad_hook(partial(self._note, name))
        self._had = {name for name, p in parts(self.root) if p.grad is not None}  # in mid-step the module has none

    def _match_trained(self) -> None:
        for parameters in self._parameters.values():
            match_trained(parameters)

    def _note(self, name: str, _: Tensor) -> None:
        self._used.add(name)

    def after_backward(self, flag: bool, device: torch.device) -> bool:
        """Average what is not divided, and take back what nobody has computed. Collective, unless it accumulates only.

        Args:
            flag: what ranks want to tell each other at this occasion.
            device: for messages.

        Returns:
            Whether any rank has given ``flag``; without the others, if gradients are only accumulated.

        Raises:
            RuntimeError: a gradient came too late to be averaged.
        """
        if not self.synchronizes:
            return flag
        self._require_in_time()
        self._used |= {name for name, parameter in self.replicated.items() if parameter.grad is not None}
        # One message of a byte for each parameter, in the order of names: the same order on every rank, whatever it has
        # used.
        told = from_numbers([flag, *[name in self._used for name in self._originals]], torch.uint8, device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        self._used.clear()
        flagged, *used = told.tolist()
        used_by_any = set(compress(self._originals, used))
        for name, parameter in self.root.named_parameters():
            is_used = name in used_by_any
            if name in self.replicated:
                if is_used:
                    self._average(parameter)
                continue
            if is_used and parameter.requires_grad:
                continue  # FSDP2 has averaged it, with zeros of the ranks that have not used it
            # FSDP2 averages zeros where no rank has a gradient, and also what was frozen within the step. In one
            # process there is none then. A gradient of an earlier average stays, unless something was added to it.
            if name not in self._had:
                parameter.grad = None
            elif is_used:
                raise RuntimeError(
                    f"{name} was frozen within a step, where it was whole already, and has a gradient of an earlier "
                    "backward pass. Freeze it before the step, or use it by calling the module that it is in."
                )
        return bool(flagged)

    def _average(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())

    def _require_in_time(self) -> None:
        for name, parameter in whole_parameters(self.root):
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{name} is used outside of the forward of its unit, and got a gradient there when the unit's own "
                    "had been averaged already. Leave that unit with the root: give `wrap=` the other modules."
                )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients of backward passes in here stay on their ranks, and are averaged with those of the next one."""
        self._synchronize(False)
        try:
            yield
        finally:
            self._synchronize(True)

    def _synchronize(self, on: bool) -> None:
        self.synchronizes = on
        for module in self._modules:
            module.set_requires_gradient_sync(on, recurse=False)

    def reshard(self) -> None:
        """Free the whole parameters of all units; each rank keeps its shares. Not collective."""
        for module in self._modules:
            module.reshard()

    def broadcast_buffers(self, device: torch.device) -> None:
        """All ranks get the first one's buffers, as under DDP. Collective."""
        broadcast_tensors(list(self.root.buffers()), world(), 0, device)

    def describe(self) -> list[tuple[str, str]]:
        """What runs here, in rows of name and value."""
        names = self.units.names
        ranks = self.shard_group.size()
        total = sum(original.numel() for original in self._originals.values())
        in_units = sum(p.numel() for name in names for p in self.root.get_submodule(name).parameters())
        when = "gathered for forward and again for backward"
        if not self.plan.reshard:
            when = "gathered for forward, kept for backward"
        shown = ", ".join(names) if len(names) < 3 else f"{names[0]} ... {names[-1]}"
        return [
            ("ranks", f"{dist.get_world_size()} on {self.plan.mesh.device_type}, {ranks} to a copy"),
            ("parameters", f"{total:,}, of which each rank keeps about {total // ranks:,}"),
            ("units", f"{len(names)} ({shown}), {when}"),
            ("outside of units", f"{total - in_units:,} parameters, whole in each step"),
            *(("note", note) for note in self.units.notes),
        ]

    # ---- the end ----

    def close(self, whole: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Leave the module alone, with whole parameters, which are the objects that they were before. Not collective.

        Args:
            whole: values of all parameters by name.

        Returns:
            These objects by the ``id`` of what they were while they were divided.
        """
        self.reshard()
        for handle in self._handles:
            handle.remove()
        divided = dict(self.root.named_parameters())
        undo(self.root)
        for name, original in self._originals.items():
            if name not in self.replicated:
                value = whole[name].detach()
                value.requires_grad_(divided[name].requires_grad)
                swap_contents(original, value)
                divided[name].grad = None  # optimizers keep the parts: torch cannot copy gradients at an offset
        for module, key, original in self._places:
            module.register_parameter(key, original)
        return {id(divided[name]): original for name, original in self._originals.items()}


def _require_dividable(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        before: Any = parameter._backward_hooks
        behind: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if before or behind:
            raise ValueError(
                f"{name} has a hook of its own, which would not be called: its parts are other tensors. Use "
                "`on_after_backward`, or strategy='smddp'."
            )
