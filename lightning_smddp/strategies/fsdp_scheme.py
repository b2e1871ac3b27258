"""How ``smddp_fsdp`` divides a module, trains it and makes it whole again: the same for the Trainer and for Fabric."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_smddp._compat.fsdp import move_undivided
from lightning_smddp.communication.consistency import require_compressible, require_initialized
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.nonfinite import NonFinite, bad_gradients
from lightning_smddp.communication.objects import broadcast
from lightning_smddp.communication.sharded_collectives import ShardedCollectives
from lightning_smddp.communication.tensors import norm_over_ranks
from lightning_smddp.patches import Patch, patched
from lightning_smddp.pipeline.activations import CHANGES_NOTHING, CHECKPOINTING, Checkpointing, call, checkpointing_on
from lightning_smddp.pipeline.partition.costs import fits_on_hosts
from lightning_smddp.pipeline.state.meta_parameters import initialize_deferred
from lightning_smddp.pipeline.state.state_dict import broadcast_initial
from lightning_smddp.sharding.fully_sharded import FullySharded, ShardingPlan
from lightning_smddp.sharding.optimizer_shards import LocalSteps, all_parameters, around_step, local_of
from lightning_smddp.sharding.optimizer_trial import why_not_elementwise
from lightning_smddp.sharding.units import Wrap, find_units
from lightning_smddp.sharding.whole_states import divided_optimizer_state, whole
from lightning_smddp.sharding.whole_view import WholeView
from lightning_smddp.strategies.nonfinite import by_asking
from lightning_smddp.strategies.options import require_bools, require_count, require_no_string, require_one_of

Sharding = Literal["full", "grad_op", "hybrid"]
ReduceType = Literal["bf16", "fp16"]
_REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class ShardingOptions:
    """What is divided how: arguments of a strategy, see there.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    sharding: Sharding
    shard_size: int | None
    wrap: Wrap
    meta_init: bool
    compression: ReduceType | None = None
    cpu_offload: bool = False
    activation_checkpointing: Checkpointing = False

    def __post_init__(self) -> None:
        require_bools(self)
        require_one_of(get_args(Sharding), sharding=self.sharding)
        if self.shard_size is not None and self.sharding != "hybrid":
            raise ValueError(f"shard_size={self.shard_size!r} belongs to sharding='hybrid', not {self.sharding!r}.")
        require_count("shard_size", self.shard_size, "None for the ranks of a node")
        require_no_string("wrap", self.wrap)
        require_one_of(CHECKPOINTING, activation_checkpointing=self.activation_checkpointing)
        require_one_of((None, *_REDUCE_DTYPES), compression=self.compression)

    def make_mesh(self, device_type: str, ranks_per_node: int) -> DeviceMesh:
        """Of all ranks, those of one copy in its last dimension. Collective.

        Raises:
            ValueError: on every rank, if they cannot be divided into copies.
        """
        # Of 8 ranks with copies among 4: [[0, 1, 2, 3], [4, 5, 6, 7]]. A row gathers units and has one copy among its
        # ranks; those of a column have the same shares, and average what the rows have summed.
        ranks = dist.get_world_size()
        size = ranks_per_node if self.shard_size is None else self.shard_size
        if self.sharding != "hybrid" or size == ranks:
            return init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
        if size < 2 or ranks % size != 0:
            raise ValueError(
                f"shard_size={size!r} has to be a number above 1 that divides the number of ranks, which is {ranks}."
            )
        return init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=("replicate", "shard"))

    def policies(self, precision: Any) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        """Types in which units and the root are gathered and gradients summed; ``precision`` is Lightning's plugin."""
        unit = root = MixedPrecisionPolicy()
        dtype = _MIXED.get(str(precision.precision))
        if dtype is not None:
            # The user's step runs in autocast, which would keep a copy in 16 bits of each weight until the backward
            # pass: weights that come in 16 bits are not copied.
            unit = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if self.compression is None:
            return unit, root
        reduce_dtype = _REDUCE_DTYPES[self.compression]
        return replace(unit, reduce_dtype=reduce_dtype), replace(root, reduce_dtype=reduce_dtype)


class FSDPScheme:
    """A module that is divided among ranks, from here to :meth:`close`. Creation is collective, outside of the view.

    Args:
        module: equal on all ranks, with values or parameters on the meta device.
        options: how to divide it.
        precision: Lightning's plugin.
        view: in which code of the user's sees whole values.
        device: of this rank.
        ranks_per_node: as the strategy was told.
        limit: how long a collective waits for a rank.

    Attributes:
        sharded: the module, divided.
    """

    def __init__(
        self,
        module: nn.Module,
        options: ShardingOptions,
        precision: Any,
        view: WholeView,
        device: torch.device,
        ranks_per_node: int,
        limit: timedelta,
    ) -> None:
        self.module = module
        self.device = device
        self.view = view
        self._broadcasts_buffers = True
        self.is_bad = False  # averages on any rank, behind the last backward pass
        require_initialized(module)
        broadcast_initial(module, world(), device=device)
        seed = broadcast(torch.initial_seed(), group_src=0)
        units = find_units(module, options.wrap)
        offload = OffloadPolicy()
        if options.cpu_offload and device.type == "cpu":
            units.notes.append("cpu_offload=True changes nothing: ranks are on CPUs, and so is all that they have")
        elif options.cpu_offload:
            _require_no_scaler(precision)
            offload = CPUOffloadPolicy()
        how = checkpointing_on(device, options.activation_checkpointing)
        if how != options.activation_checkpointing:
            units.notes.append(CHANGES_NOTHING)
        if options.compression is not None:
            require_compressible(module)
        unit_policy, root_policy = options.policies(precision)

        # Called before each unit is divided: its layers get memory and values, unit by unit, so that no rank ever holds
        # all of them. The seed of first values is the same on all ranks.
        def fill(names: Sequence[str]) -> None:
            if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
                initialize_deferred(module, names, device, seed)

        mesh = options.make_mesh(device.type, ranks_per_node)
        plan = ShardingPlan(
            mesh=mesh,
            reshard=options.sharding != "grad_op",
            unit_precision=unit_policy,
            root_precision=root_policy,
            offload=offload,
            fill=fill,
        )
        # Shares are on the device when they are made, and with `cpu_offload` on the host: `module.to` would undo that,
        # so only the rest is moved, such as buffers.
        self.sharded = FullySharded(module, units, plan)
        self._collectives = ShardedCollectives(mesh, limit)  # behind what may be refused
        self._collectives.attach(module)
        move_undivided(module, device)
        # Made once, as what compiles a unit looks at the object.
        self._patches = list(_checkpointed(module, units.names, how)) if how else []

    def describe(self) -> list[tuple[str, str]]:
        """What runs here, in rows of name and value."""
        notes = [("note", note) for note in self._collectives.notes]
        return [*self.sharded.describe(), ("communication", self._collectives.describe()), *notes]

    # ---- steps ----

    @contextmanager
    def forward(self, trains: bool, broadcasts_buffers: bool = True) -> Iterator[None]:
        """Around code of the user's that calls the module: the root's parameters are whole. Collective.

        As under DDP the first rank's buffers go to all before it, but not in the middle of an accumulation.
        """
        if self._broadcasts_buffers and broadcasts_buffers:
            self.sharded.broadcast_buffers(self.device)
        self._broadcasts_buffers = trains and self.sharded.synchronizes
        with self.sharded.step(trains), self.view.inside(), patched(self._patches):
            yield

    def after_backward(self, looks: bool) -> None:
        """See that all gradients were averaged, and with ``looks`` that they are numbers.

        Collective, unless it accumulates only.
        """
        bad = looks and self.sharded.synchronizes and bad_gradients(self.module.named_parameters()) is not None
        self.is_bad = self.sharded.after_backward(bad, self.device)

    # ---- the end ----

    def make_whole(self) -> dict[int, Tensor]:
        """Give back a whole module on each rank, if there is room for it. Collective.

        Returns:
            See :meth:`FullySharded.close`; empty where there is no room.
        """
        module = self.module
        self.sharded.reshard()
        self.sharded.hold_memory(False)
        # Asked of all hosts: where one has no room, no rank gathers, as none can do so alone.
        if not fits_on_hosts(module, world()):
            if dist.get_rank() == 0:
                warnings.warn(
                    f"{type(module).__name__} stays divided: a host has too little memory for the whole of it on each "
                    "of its ranks. Load its last checkpoint where there is room.",
                    stacklevel=2,
                )
            return {}
        gathered = {name: whole(parameter) for name, parameter in module.named_parameters()}
        return self.sharded.close(gathered)

    def close(self) -> None:
        """Free memory that ranks share. Not collective."""
        self._collectives.close()


def _checkpointed(root: nn.Module, names: Sequence[str], how: Checkpointing) -> Iterator[Patch]:
    """Units of ``root`` that keep less for backward: within FSDP2's hooks, so with whole parameters."""
    inside = tuple(f"{name}." for name in names if how is True)  # the outermost runs again, and those in it with it
    for name in names:
        if not name.startswith(inside):
            unit = root.get_submodule(name)
            yield vars(unit), "forward", partial(call, how, unit, unit.forward)


class SteppedOptimizer:
    """An optimizer that steps divided parameters, until :meth:`close`.

    One that treats each element by itself steps this rank's shares, as plain tensors; any other steps whole values, and
    each rank all of them.

    Attributes:
        optimizer: the user's.
        schemes: of the modules that have its parameters.
    """

    def __init__(self, optimizer: Optimizer, schemes: Sequence[FSDPScheme], view: WholeView) -> None:
        self.optimizer = optimizer
        self.schemes = schemes
        self._view = view
        self._shares = [] if why_not_elementwise(optimizer) else [LocalSteps(optimizer)]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step, its closure included."""
        # A unit may still be whole, behind a forward pass alone say. Freed now, it is gathered from the new shares the
        # next time, and not taken as it was before the step.
        for scheme in self.schemes:
            scheme.sharded.reshard()
        with around_step(self._shares), self._view.inside(not self._shares):
            yield

    def clip_by_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` by the norm of all ranks' shares. Collective."""
        group, device = self.schemes[0].sharded.shard_group, self.schemes[0].device
        gradients = [p.grad for p in all_parameters(self.optimizer) if p.grad is not None]
        # What all ranks have counts once.
        own = [local_of(gradient) for gradient in gradients if isinstance(gradient, DTensor) or group.rank() == 0]
        norm = norm_over_ranks(own, group, norm_type, device, error_if_nonfinite)
        # Most steps need no scaling. That is known where the norm is; of a device it would have to be waited for.
        if device.type != "cpu" or not float(norm) + 1e-6 <= max_norm:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's
            for gradient in map(local_of, gradients):
                gradient.mul_(factor.to(gradient.device))
        return norm

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole optimizer's state, which all ranks have."""
        with self._view.inside(False):
            divided = divided_optimizer_state(all_parameters(self.optimizer), state_dict)
            # Not by Lightning, which would move all to the GPU, offloaded or not, nor by what Fabric's script calls.
            type(self.optimizer).load_state_dict(self.optimizer, divided)

    def nonfinite(self) -> NonFinite | None:
        """What is wrong with this rank's shares of the gradients; None if no rank has found anything.

        Outside of the view. Collective where a backward pass has left something, which may have been cleaned since.
        """
        if not any(scheme.is_bad for scheme in self.schemes):  # the same answer on all ranks
            return None
        stepped = {id(parameter) for parameter in all_parameters(self.optimizer)}
        named = chain.from_iterable(scheme.module.named_parameters() for scheme in self.schemes)
        bad = bad_gradients((name, parameter) for name, parameter in named if id(parameter) in stepped)
        return by_asking(None if bad is None else NonFinite(bad), self.schemes[0].device)

    def close(self) -> None:
        """Its steps are torch's own again."""
        for shares in self._shares:
            shares.close()


def _require_no_scaler(precision: Any) -> None:
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            f"precision={precision.precision!r} cannot be used with cpu_offload=True: torch's gradient scaler tells "
            "other ranks of overflows on GPUs only. Use precision='bf16-mixed', or cpu_offload=False."
        )
