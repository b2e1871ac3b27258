"""How ``smddp_fsdp`` divides a module, and makes it whole again: the same for the Trainer and for Fabric."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from lightning_smddp._compat.fsdp import move_undivided
from lightning_smddp.communication.compression import check_compressible
from lightning_smddp.communication.nonfinite import agreed, bad_gradients
from lightning_smddp.communication.sharded_collectives import ShardedCollectives
from lightning_smddp.pipeline.partition.costs import fits_on_hosts
from lightning_smddp.pipeline.state.meta_parameters import initialize_deferred
from lightning_smddp.sharding.fully_sharded import FullySharded, ShardingPlan
from lightning_smddp.sharding.units import Wrap, find_units
from lightning_smddp.sharding.whole_states import whole
from lightning_smddp.strategies.checks import unit_precision
from lightning_smddp.strategies.options import require_bools

Sharding = Literal["full", "grad_op", "hybrid"]
_SHARDINGS = ("full", "grad_op", "hybrid")
ReduceType = Literal["bf16", "fp16"]
_REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    cpu_offload: bool = False
    compression: ReduceType | None = None

    def __post_init__(self) -> None:
        sharding, size = self.sharding, self.shard_size
        if sharding not in _SHARDINGS:
            valid = ", ".join(map(repr, _SHARDINGS))
            raise ValueError(f"sharding={sharding!r} is unknown. Valid: {valid}.")
        if size is not None and sharding != "hybrid":
            raise ValueError(f"shard_size={size!r} belongs to sharding='hybrid', and sharding is {sharding!r}.")
        require_bools(meta_init=self.meta_init, cpu_offload=self.cpu_offload)
        if self.compression not in (None, *_REDUCE_DTYPES):
            raise ValueError(
                f"compression={self.compression!r} cannot be used with sharded parameters, whose gradients torch sums "
                "in one type. Valid: None, 'bf16', 'fp16'; or use strategy='smddp', which does not shard parameters."
            )

    def require_layout(self, nodes: int, ranks_per_node: int) -> None:
        """Raise ``ValueError`` if the ranks cannot be divided into copies."""
        if self.sharding != "hybrid":
            return
        ranks = nodes * ranks_per_node
        size = self._ranks_of_copy(ranks, ranks_per_node)
        if not isinstance(size, int) or size < 2 or ranks % size != 0:
            raise ValueError(
                f"shard_size={size!r} has to be a number above 1 that divides the number of ranks, which is {ranks}."
            )

    def make_mesh(self, device_type: str, ranks_per_node: int) -> DeviceMesh:
        """Of all ranks, those of one copy in its last dimension. Collective."""
        # Of 8 ranks with copies among 4: [[0, 1, 2, 3], [4, 5, 6, 7]]. A row gathers units and has one copy among its
        # ranks; those of a column have the same shares, and average what the rows have summed.
        ranks = dist.get_world_size()
        size = self._ranks_of_copy(ranks, ranks_per_node)
        if size == ranks:
            return init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
        return init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=("replicate", "shard"))

    def _ranks_of_copy(self, ranks: int, ranks_per_node: int) -> int:
        if self.sharding != "hybrid":
            return ranks
        if self.shard_size is None:
            return ranks_per_node
        return self.shard_size


@dataclass(frozen=True)
class Place:
    """Where modules are divided.

    Attributes:
        device: of this rank.
        ranks_per_node: as the strategy was told.
        limit: how long a collective waits for a rank.
    """

    device: torch.device
    ranks_per_node: int
    limit: timedelta


def divide(
    module: nn.Module, options: ShardingOptions, place: Place, precision: Any, seed: int
) -> tuple[FullySharded, ShardedCollectives]:
    """Divide ``module``, which is equal on all ranks. Collective.

    Args:
        module: with values, or parameters on the meta device.
        options: how.
        place: where.
        precision: Lightning's plugin.
        seed: of first values of what is on the meta device, the same on all ranks.
    """
    units = find_units(module, options.wrap)
    offload = OffloadPolicy()
    if options.cpu_offload and place.device.type == "cpu":
        units.notes.append("cpu_offload=True changes nothing: ranks are on CPUs, and so is all that they have")
    elif options.cpu_offload:
        _require_no_scaler(precision)
        offload = CPUOffloadPolicy()

    unit_policy = unit_precision(precision)
    if options.compression is not None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                check_compressible(parameter.dtype, f"The gradient of {name!r}")
        unit_policy = replace(unit_policy, reduce_dtype=_REDUCE_DTYPES[options.compression])

    # Called before each unit is divided: its layers get memory and values, unit by unit, so that no rank ever holds
    # all of them.
    def fill(names: Sequence[str]) -> None:
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            initialize_deferred(module, names, place.device, seed)

    mesh = options.make_mesh(place.device.type, place.ranks_per_node)
    collectives = ShardedCollectives(mesh, place.limit)
    plan = ShardingPlan(
        mesh=mesh,
        reshard=options.sharding != "grad_op",
        unit_precision=unit_policy,
        offload=offload,
        fill=fill,
    )
    # Shares are on the device when they are made, and with `cpu_offload` on the host: `module.to` would undo that, so
    # only the rest is moved, such as buffers.
    sharded = FullySharded(module, units, plan)
    collectives.attach(module)
    move_undivided(module, place.device)
    return sharded, collectives


def _require_no_scaler(precision: Any) -> None:
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            f"precision={precision.precision!r} cannot be used with cpu_offload=True: torch's gradient scaler looks "
            "for overflows where gradients are, on the CPU, and tells other ranks by messages between GPUs. Use "
            "precision='bf16-mixed', or cpu_offload=False."
        )


def make_whole(sharded: FullySharded, device: torch.device) -> dict[int, Tensor]:
    """Give back a whole module on each rank, if there is room for it. Collective.

    Returns:
        See :meth:`FullySharded.close`; empty where there is no room.
    """
    module, world = sharded.root, dist.group.WORLD
    assert world is not None
    sharded.reshard()
    sharded.hold_memory(False)
    # Asked of all hosts: where one has no room, no rank gathers, as none can do so alone.
    if not fits_on_hosts(module, world):
        if dist.get_rank() == 0:
            warnings.warn(
                f"{type(module).__name__} stays divided: a host has too little memory for the whole of it on each "
                "of its ranks. Load its last checkpoint where there is room.",
                stacklevel=2,
            )
        return {}
    gathered = {name: whole(parameter, device) for name, parameter in module.named_parameters()}
    return sharded.close(gathered)


class AverageWatch:
    """What is known of the gradients that the latest backward pass of a divided module has averaged."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._bad: Mapping[str, str] | None = None  # that are not finite, on this rank
        self._is_bad = False  # on any rank

    def begin(self, loss: Tensor) -> None:
        """A backward pass of ``loss`` comes."""
        self._loss = loss.detach()

    def end(self, sharded: FullySharded, looks: bool, device: torch.device) -> None:
        """See that all gradients were averaged, and with ``looks`` that they are numbers.

        Collective, unless it accumulates only.
        """
        self._bad = None
        if looks and sharded.synchronizes:
            self._bad = bad_gradients(sharded.root.named_parameters())
        self._is_bad = sharded.after_backward(self._bad is not None, device)

    def findings(self, device: torch.device) -> Mapping[str, str] | None:
        """What is wrong on this rank; None if no rank has found anything. Collective where one has.

        What each rank brought is in the average already, but its loss may tell.
        """
        if not self._is_bad:
            return None
        group = dist.group.WORLD
        assert group is not None
        assert self._loss is not None
        # A rank whose loss is not finite is the cause. Where there is one, the others say nothing.
        own: dict[str, str] = {}
        if not bool(self._loss.isfinite().all()):
            own["the loss"] = str(float(self._loss.sum()))
        if agreed(bool(own), group, device):
            return own
        for name, text in (self._bad or {}).items():
            own[f"the average of {name}"] = text
        return own
