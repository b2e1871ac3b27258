"""``Trainer(strategy="smddp")``: Lightning's DDPStrategy with our communication hook (by ``ddp_scheme.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp.communication.algorithms import AlgorithmName
from lightning_smddp.communication.compression import Compression, Method
from lightning_smddp.communication.diloco import DiLoCo
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.nonfinite import NonFinite
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.patches import patched
from lightning_smddp.sharding.optimizer_shards import around_step, unwrapped
from lightning_smddp.sharding.optimizer_states import load_whole_state_dict
from lightning_smddp.strategies.base import TrainerStrategy
from lightning_smddp.strategies.checks import is_changed_hook, may_have_changed_gradients
from lightning_smddp.strategies.ddp_scheme import DDPScheme
from lightning_smddp.strategies.front import Front
from lightning_smddp.strategies.options import (
    CommunicationOptions,
    ReliabilityOptions,
    Resume,
    Shard,
    StrategyOptions,
    arguments_of,
    by_name,
    group_of,
)
from lightning_smddp.strategies.tables import print_table, say

MOMENTUM_KEY = "smddp_outer_momentum"


class ReplicatedFront(Front):
    """What the Trainer's strategy and Fabric's have in common: arguments, and the steps of optimizers."""

    _scheme: DDPScheme

    def __init__(  # noqa: PLR0913  # what most scripts set; groups have the rest
        self,
        *args: Any,
        algorithm: AlgorithmName = "auto",
        compression: Method | Compression | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool | None = None,
        resume: Resume = None,
        shard: Shard = None,
        sync: DiLoCo | None = None,
        communication: CommunicationOptions = CommunicationOptions(),
        reliability: ReliabilityOptions = ReliabilityOptions(),
        **kwargs: Any,
    ) -> None:
        known = arguments_of(*type(self).__mro__, DistributedDataParallel)
        kwargs = by_name(self, super().__init__, args, kwargs, known)
        options = StrategyOptions.of(
            communication,
            reliability,
            compression,
            algorithm=algorithm,
            bucket_cap_mb=bucket_cap_mb,
            resume=resume,
            shard=shard,
        )
        for name in ("ddp_comm_hook", "model_averaging_period"):
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}` replaces our communication. Use `compression=`, or DDPStrategy.")
        if gradient_as_bucket_view is not None:
            kwargs["gradient_as_bucket_view"] = gradient_as_bucket_view
        super().__init__(**kwargs)
        self._scheme = DDPScheme(options, None if sync is None else group_of(DiLoCo, sync))
        self._hold_parts(options, self._scheme.close)

    def _stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        return around_step(self._scheme.shards)


class DataParallel(ReplicatedFront, TrainerStrategy):
    """Data parallelism with optimized all-reduce; a drop-in for ``DDPStrategy``.

    Args:
        *args: arguments of ``DDPStrategy``, in its order.
        algorithm: how gradients are summed: ``"native"`` (the backend's all-reduce), ``"shared_memory"`` (CPU ranks
            of one node, without copies), ``"hierarchical"`` (inside nodes first, then between ranks of equal local
            rank), ``"balanced"`` (balanced fusion buffers between nodes), or ``"auto"``: the fastest on this
            cluster, measured at the start of fit.
        compression: of gradients between nodes: None (exact), ``"bf16"``, ``"fp16"``, ``"int8"``, ``"powersgd"``, or a
            :class:`~lightning_smddp.Compression` with details.
        bucket_cap_mb: size of DDP's buckets in MiB; None is DDP's default.
        gradient_as_bucket_view: as of DDP; None is True.
        resume: ``"auto"`` continues from the newest valid checkpoint when ``fit`` is not given one, as after a restart
            by torchrun, Slurm or SageMaker; ``"never"`` starts from scratch then. None is ``"auto"`` in a SageMaker
            job, else ``"never"``.
        shard: ``"optimizer"`` has each rank step a share of the parameters and keep that share of the optimizer's state
            (ZeRO's first stage).
        sync: ``DiLoCo(every=30)`` has the ranks of a node exchange gradients, and nodes their parameters in every 30
            steps; see :class:`~lightning_smddp.DiLoCo`.
        communication: timeouts, what is printed, how ranks' batches count.
        reliability: faults, stops and checkpoints.
        **kwargs: arguments of ``DDPStrategy`` and of ``DistributedDataParallel``, by name.

    Raises:
        TypeError: an argument is unknown, or belongs into a group of options; the message says what to write.
        ValueError: an argument is not one of the valid values; the message lists them.
    """

    @property
    def communication_report(self) -> CommunicationReport | None:
        """What gradient communication cost so far; None before fit. Collective: read it on every rank."""
        return self._scheme.report() or self._last_report

    # ---- gradients ----

    @override
    def configure_ddp(self) -> None:
        """Choose the communication and wrap the model."""
        assert self.model is not None
        watches = self._checks.watches_gradients
        self.model = self._scheme.wrap(self.model, self.root_device, self._limit, self._ddp_kwargs, watches)

    def _training_batch_starts(self) -> None:
        outer = self._scheme.outer
        if outer is not None:
            outer.step(self._trainer.global_step)
        if self._scheme.has_unfrozen:  # DDP cannot be told of more parameters, so the module is wrapped once more
            assert isinstance(self.model, DistributedDataParallel)
            self.model = self.model.module
            self._scheme.unwrap()
            self.configure_ddp()
            if outer is not None:
                outer.follow()

    @contextmanager
    def _averaging(self, loss: Tensor) -> Iterator[None]:
        yield
        self._scheme.require_averaged(
            "Unfreeze them before the training step, as in `on_train_epoch_start` or `on_train_batch_start`."
        )

    def _find_nonfinite(self, optimizer: Optimizer) -> NonFinite | None:
        return self._scheme.nonfinite(optimizer, may_have_changed_gradients(self._trainer))

    @property
    def _nonfinite_group(self) -> dist.ProcessGroup:
        communicator = self._scheme.communicator
        return world() if communicator is None else communicator.group

    def _synchronize(self) -> None:
        if self._scheme.outer is not None:
            self._scheme.outer.flush(self._trainer.global_step)

    # ---- optimizers ----

    def _shard_optimizers(self) -> None:
        if self._scheme.options.shard is None or self._scheme.communicator is None:
            return
        optimizers = [unwrapped(optimizer) for optimizer in self.optimizers]
        self._scheme.shard_optimizers(self._module.parameters(), optimizers)
        # Clipping by norm reads every gradient. They are equal on all ranks, so each rank reads its share, and the
        # ranks add up. A plugin that clips in its own way goes on doing so.
        plugin = self.precision_plugin
        if not is_changed_hook(plugin, "clip_grad_by_norm"):
            self._changes.enter_context(patched([(vars(plugin), "clip_grad_by_norm", self._clip_by_norm)]))

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        (sharded,) = self._scheme.sharded  # it has all optimizers
        sharded.clip_by_norm(unwrapped(optimizer), clip_val)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._scheme.outer is not None:
            self._scheme.outer.average_state(optimizer)
        if not self._scheme.sharded:
            return super()._optimizer_state(optimizer)
        return self._scheme.optimizer_state(optimizer, self.root_device)

    @property
    def _is_divided(self) -> bool:
        return bool(self._scheme.sharded) or self._scheme.outer is not None

    def _model_state(self) -> dict[str, Any]:
        self._synchronize()
        return super()._model_state()

    def _add_to(self, checkpoint: dict[str, Any]) -> None:
        outer = self._scheme.outer
        if outer is not None and "optimizer_states" in checkpoint:
            checkpoint[MOMENTUM_KEY] = outer.momentum

    # ---- a run ----

    def _training_starts(self) -> None:
        if self._scheme.outer is not None:
            self._scheme.outer.begin(self._trainer.global_step)
        if self._speaks and self._scheme.communicator is not None:
            print_table("smddp: data parallelism", self._scheme.describe(), self._trainer)

    def _training_ends(self) -> None:
        self._synchronize()
        self._last_report = self._scheme.report() or self._last_report
        if self._scheme.synchronizers and self._speaks and self.world_size > 1:
            say(str(self._last_report), self._trainer)
            if self._scheme.outer is not None:
                say(str(self._scheme.outer), self._trainer)

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._scheme.sharded:
            super()._load_optimizers(checkpoint)
            if self._scheme.outer is not None:
                saved = checkpoint.get(MOMENTUM_KEY, {})
                self._scheme.outer.momentum = {name: value.to(self.root_device) for name, value in saved.items()}
            return
        for shards, state in zip(self._scheme.shards, checkpoint["optimizer_states"], strict=True):
            load_whole_state_dict(shards, state)
