"""A LightningModule whose training step cannot be cut: whole on every rank, each of which runs the whole step.

All ranks of a pipeline run the same step on the same batch with the same random numbers, so they stay equal, and hooks,
callbacks and other steps see what they would in one process. Replicas have batches of their own; their gradients are
averaged after each backward pass, as ``ddp`` would.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp._compat.torch_steps import behind_backwards
from lightning_smddp.bridge.module_states import ModuleState
from lightning_smddp.bridge.run_setup import RunSetup
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.nonfinite import bad_gradients
from lightning_smddp.pipeline.gradients.whole_gradients import WholeGradients
from lightning_smddp.resume.random_states import RandomStates, from_plain, to_plain
from lightning_smddp.sharding.optimizer_shards import OptimizerShards
from lightning_smddp.sharding.optimizer_states import whole_state_dict
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers
from lightning_smddp.wire.encode import bits_of, float_of
from lightning_smddp.wire.values import broadcast_value

_CURE = (
    "It trains as in one process: right, but no faster, and each rank needs memory for the whole model. "
    "PartitionOptions(fallback='error') refuses such steps instead."
)
_WITNESSES = 8  # parameters whose values are looked at: the smallest
_ROUNDING = 1e-2  # relative differences of losses that the order of additions on a GPU explains


class ReplicatedModule(ModuleState):
    """Runs the steps of a module that is whole on every rank of a pipeline.

    Args:
        setup: of the run.
        optimizers: the user's, of all parameters.
        reason: why the training step cannot be pipelined, and where.
        watching: whether to look for NaN and inf in gradients before they are averaged.
        shards: of the optimizers, to be shared by all ranks; empty without ``shard="optimizer"``.
    """

    def __init__(
        self,
        setup: RunSetup,
        optimizers: Sequence[Optimizer],
        reason: str,
        watching: bool,
        shards: Sequence[OptimizerShards] = (),
    ) -> None:
        self.setup = setup
        self.optimizers = optimizers
        self.reason = reason
        self._module = setup.module
        self._same = SameRanks(setup.module, setup.groups.pipeline, setup.device)
        self._data_parallel_group = setup.groups.data_parallel_group
        self._shares_buffers = setup.num_replicas > 1
        self._averages = False
        self.gradients: WholeGradients | None = None
        # On a device the order of additions differs from run to run: also the ranks of one pipeline average then.
        if setup.device.type != "cpu":
            self.gradients = WholeGradients(setup.module, setup.world, setup.device)
        elif setup.num_replicas > 1:
            self.gradients = WholeGradients(setup.module, self._data_parallel_group, setup.device)
        if self.gradients is not None:
            self.gradients.watching = watching
        self.sharded: ShardedOptimizers | None = None
        if shards:
            self._shard(shards)

    def _shard(self, shards: Sequence[OptimizerShards]) -> None:
        """Let all ranks, which have the same parameters and gradients, step a share each. Collective over all ranks."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self._communicator = Communicator(self.setup.world, self.setup.device, self.setup.timeout)
        self.sharded = ShardedOptimizers(list(self._module.named_parameters()), shards, self._communicator)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.load_optimizer_states(states)

    def close(self) -> None:
        """Give the parameters memory of their own. Not collective."""
        if self.sharded is not None:
            self.sharded.close()
            self._communicator.close()

    def train(self, step: Callable[[], Any], name: str, accumulates: bool = False) -> Any:
        """Run the training step called ``name`` once. Collective over the pipeline, and over the replicas.

        Raises:
            DriftError: on every rank: the ranks of the pipeline no longer compute the same.
        """
        if self._shares_buffers:
            self._share_buffers()
        self._shares_buffers = self.setup.num_replicas > 1 and not accumulates  # when ``ddp`` would
        self._same.begin()
        with self.averaging():
            output = step()
        self._same.end(output, name)
        return output

    def _share_buffers(self) -> None:
        """All replicas go on with the buffers of the first, as under ``ddp``."""
        for buffer in self._module.buffers():
            value = buffer.detach().contiguous()
            dist.broadcast(value, group=self._data_parallel_group, group_src=0)
            if value.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(value)

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """Run another step once. Collective over the pipeline."""
        self._same.begin()
        return step()

    @contextmanager
    def averaging(self, accumulates: bool = False) -> Iterator[None]:
        """In this context gradients are averaged behind each backward pass, unless it only ``accumulates``."""
        if self.gradients is None or accumulates or self._averages:
            yield
            return
        self._averages = True
        try:
            with behind_backwards(self.gradients.average):
                yield
        finally:
            self._averages = False

    def warning(self) -> str:
        """For the user, once, where it begins."""
        return f"The training step is run as a whole on every rank, as it cannot be pipelined: {self.reason} {_CURE}"

    # ---- state ----

    @override
    def nonfinite(self) -> dict[str, str] | None:
        if self.gradients is None:
            return bad_gradients(self._module.named_parameters())
        return self.gradients.take_nonfinite()

    @override
    def state_dict(self, gather: bool) -> dict[str, Any]:
        """All ranks have all of it: for a sharded checkpoint one of them gives it."""
        if gather or self._is_first():
            return super().state_dict(gather)
        return {}

    @override
    def optimizer_state(self, optimizer: Optimizer, gather: bool) -> dict[str, Any]:
        """Of a sharded checkpoint each rank has the parameter groups' options."""
        if self.sharded is not None:
            return whole_state_dict(self.sharded.of(optimizer), self.setup.world, self.setup.device)
        state: dict[str, Any] = optimizer.state_dict()
        if gather or self._is_first():
            return state
        return {**state, "state": {}}

    @override
    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        if self.sharded is not None:
            self.sharded.load_whole_state_dicts(states)
            return
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(dict(state))

    def _is_first(self) -> bool:
        return self.setup.groups.replica == 0 and self.setup.groups.pipeline_rank == 0


class DriftError(RuntimeError):
    """Ranks that should compute the same thing do not."""


class SameRanks:
    """Holds the ranks of ``group`` together, with one message of a few numbers each step.

    Args:
        module: whole on each rank.
        group: the ranks that all run the whole step.
        device: where ``group``'s collectives take their tensors from.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.module = module
        self.group = group
        self.device = device
        self._states = RandomStates(device)
        self._loss = 0.0
        self._name = ""  # of the step that it is the loss of

    def begin(self) -> None:
        """Before a step: compare what the last one has come to, and random numbers. Collective.

        Where random numbers differ, all ranks go on with those of the first.

        Raises:
            DriftError: on every rank.
        """
        # Integers all, of each rank: a checksum of its random states, and the bits of its loss and of its witnesses.
        seen = [bits_of(value) for value in (self._loss, *self._witnesses())]
        local = torch.tensor([self._random_sum(), *seen], device=self.device)
        gathered = [torch.empty_like(local) for _ in range(self.group.size())]
        dist.all_gather(gathered, local, group=self.group)
        checksums = []
        values = []
        for of_rank in gathered:
            checksum, *bits = of_rank.tolist()
            checksums.append(checksum)
            values.append([float_of(one) for one in bits])
        self._require_equal(values)
        if len(set(checksums)) > 1:
            self._share_random_numbers()

    def end(self, output: Any, name: str) -> None:
        """After the step called ``name``, which returned ``output``."""
        loss = output
        if isinstance(output, dict):
            loss = output.get("loss")
        self._loss = 0.0
        if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
            self._loss = float(loss.detach())
        self._name = name

    def _require_equal(self, gathered: Sequence[Sequence[float]]) -> None:
        tolerance = _ROUNDING
        if self.device.type == "cpu":
            tolerance = 0.0
        expected_loss, *expected = gathered[0]
        for rank, (loss, *witnesses) in enumerate(gathered):
            if _differ(loss, expected_loss, tolerance):
                what = f"the loss of {self._name} is {loss!r} on rank {rank} of the pipeline and {expected_loss!r} on"
            # Parameters are the same bit by bit, also on a GPU, where gradients are averaged over these ranks.
            elif any(_differ(one, other, 0.0) for one, other in zip(witnesses, expected, strict=True)):
                what = f"behind {self._name or 'the start'} the parameters on rank {rank} of the pipeline differ from"
            else:
                continue
            raise DriftError(
                f"All ranks of the pipeline run the whole step on the same batch, but {what} rank 0. Something in the "
                "step or in a hook depends on the rank (`self.global_rank`, `is_global_zero`), on a random generator "
                "of its own, or on the time. Let it depend on the batch and on torch's, Python's or numpy's random "
                "numbers only."
            )

    def _witnesses(self) -> list[float]:
        """Sums of the smallest parameters that are trained."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        trained.sort(key=Tensor.numel)
        sums = []
        for parameter in trained[:_WITNESSES]:
            if not parameter.is_complex():
                total = parameter.detach().double().sum()
                sums.append(float(total))
        return sums

    def _random_sum(self) -> int:
        checksum = 0
        for name, state in to_plain(self._states.capture()).items():
            parts = {"": state}
            if isinstance(state, dict):
                parts = state
            for key, part in parts.items():
                if isinstance(part, Tensor):
                    data = part.numpy().tobytes()
                else:
                    data = repr(part).encode()
                checksum = zlib.crc32(f"{name}{key}".encode() + data, checksum)
        return checksum

    def _share_random_numbers(self) -> None:
        """All ranks go on with the random numbers of the first."""
        states = broadcast_value(to_plain(self._states.capture()), 0, self.group, self.device)
        self._states.restore(from_plain(states))


def _differ(one: float, other: float, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) != math.isnan(other)
    if one == other:
        return False
    return not abs(one - other) <= tolerance * max(abs(one), abs(other))
