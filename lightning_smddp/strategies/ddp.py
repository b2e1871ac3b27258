"""``Trainer(strategy="smddp")``: Lightning's DDPStrategy with our communication hook.

Written once for both packages that Lightning is published as; ``lightning.py`` and ``pytorch_lightning.py`` put it on
top of their ``DDPStrategy``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_smddp.communication.algorithms import AlgorithmName
from lightning_smddp.communication.compression import Compression, Method
from lightning_smddp.communication.nonfinite import NonFinite, bad_gradients
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.sharding.optimizer_shards import OptimizerShards, all_parameters, unwrapped
from lightning_smddp.sharding.optimizer_states import whole_state_dict
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers
from lightning_smddp.strategies.base import TrainerStrategy
from lightning_smddp.strategies.frozen_parameters import FrozenParameters
from lightning_smddp.strategies.nonfinite import by_asking
from lightning_smddp.strategies.options import (
    CommunicationOptions,
    ReliabilityOptions,
    Resume,
    Shard,
    StrategyOptions,
    arguments_of,
    by_name,
    require_known,
)
from lightning_smddp.strategies.tables import print_table, say
from lightning_smddp.wording import counted

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class DataParallel(TrainerStrategy):
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
        gradient_as_bucket_view: as of DDP; None is True, unless there is a ``ddp_comm_hook``.
        resume: ``"auto"`` continues from the newest valid checkpoint when ``fit`` is not given one, as after a restart
            by torchrun, Slurm or SageMaker; ``"never"`` starts from scratch then. None is ``"auto"`` in a SageMaker
            job, else ``"never"``.
        shard: ``"optimizer"`` has each rank step a share of the parameters and keep that share of the optimizer's state
            (ZeRO's first stage).
        communication: timeouts, what is printed.
        reliability: faults, stops and checkpoints.
        **kwargs: arguments of ``DDPStrategy`` and of ``DistributedDataParallel``, by name.

    Raises:
        TypeError: an argument is unknown, or belongs into a group of options; the message says what to write.
        ValueError: an argument is not one of the valid values; the message lists them.
    """

    _sharded: ShardedOptimizers | None = None  # while it trains
    _frozen: FrozenParameters | None = None  # while it trains

    def __init__(
        self,
        *args: Any,
        algorithm: AlgorithmName = "auto",
        compression: Method | Compression | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool | None = None,
        resume: Resume = None,
        shard: Shard = None,
        communication: CommunicationOptions = CommunicationOptions(),
        reliability: ReliabilityOptions = ReliabilityOptions(),
        **kwargs: Any,
    ) -> None:
        require_known(self, kwargs, arguments_of(*type(self).__mro__, DistributedDataParallel))
        options = StrategyOptions.of(communication, reliability, algorithm, compression, bucket_cap_mb, resume, shard)
        kwargs = by_name(super().__init__, args, kwargs)
        if kwargs.get("ddp_comm_hook") is not None and (algorithm != "auto" or compression is not None):
            raise ValueError(
                f"`ddp_comm_hook` replaces our communication, so algorithm={algorithm!r} and "
                f"compression={compression!r} would have no effect. Give either the hook or these."
            )
        if shard is not None and (kwargs.get("ddp_comm_hook") or kwargs.get("model_averaging_period")):
            raise ValueError(
                f"shard={shard!r} needs gradients that our communication has made equal on all ranks, so it cannot be "
                "used with `ddp_comm_hook` or `model_averaging_period`. Give either."
            )
        if gradient_as_bucket_view is not None:
            kwargs["gradient_as_bucket_view"] = gradient_as_bucket_view
        super().__init__(**kwargs)
        self._hold_parts(options)
        self._shard = shard

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Without memory that this process shares with others."""
        return {**super().__getstate__(), "_sharded": None, "_frozen": None}

    @property
    def communication_report(self) -> CommunicationReport | None:
        """What gradient communication cost so far; None before fit. Collective: read it on every rank."""
        if not self._session.synchronizers:
            return self._last_report
        return self._session.report()

    # ---- gradients ----

    @override
    def configure_ddp(self) -> None:
        """Choose the communication and wrap the model."""
        assert self.model is not None
        self._frozen = FrozenParameters(self.model)
        if self._ddp_comm_hook is not None:  # it averages: nothing of ours is made
            if self._session.options.bucket_cap_mb is not None:
                self._ddp_kwargs["bucket_cap_mb"] = self._session.options.bucket_cap_mb
            super().configure_ddp()
            return
        looks = self._checks.watches_gradients
        self.model = self._session.wrap(self.model, self.root_device, self._ddp_kwargs, self._timeout, looks)

    @override
    def _training_batch_starts(self) -> None:
        if self._frozen is None:
            return
        unfrozen = self._frozen.unfrozen()
        if unfrozen:
            self._wrap_again(self._frozen)
            if self._speaks:
                text = f"smddp: averages the gradients of {counted(len(unfrozen), 'parameter')} more, now unfrozen"
                say(text, self._trainer)

    def _wrap_again(self, frozen: FrozenParameters) -> None:
        """Let DDP average what was unfrozen, too. Collective."""
        # DDP cannot be told of more parameters, so the module is wrapped once more, in other buckets. What compression
        # has not sent yet is left out.
        assert isinstance(self.model, DistributedDataParallel)
        self._session.detach()
        self.model = self.model.module
        gc.collect()  # DDP objects are cycles, and the old one's buckets are as large as the gradients
        with frozen.others_require_gradients():
            self.configure_ddp()

    @override
    @contextmanager
    def _averaging(self, loss: Tensor) -> Iterator[None]:
        yield
        if self._frozen is not None:
            self._frozen.require_no_gradients(
                "Unfreeze them before the training step, as in `on_train_epoch_start` or `on_train_batch_start`."
            )

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        # As `DDPStrategy` does with CUDA devices alone: on CPUs it ignores the user's hook.
        hook = self._ddp_comm_hook
        assert hook is not None
        if self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        self.model.register_comm_hook(state=self._ddp_comm_state, hook=hook)

    @override
    def _find_nonfinite(self, optimizer: Optimizer) -> NonFinite | None:
        if self._session.synchronizers:
            return self._session.synchronizers[-1].nonfinite(all_parameters(optimizer))
        # A communication hook of the user's own need not leave the same on all ranks.
        found = bad_gradients(self._module.named_parameters())
        return by_asking(None if found is None else NonFinite(found), self.root_device)

    # ---- optimizers ----

    @override
    def _shard_optimizers(self) -> None:
        self._sharded = None
        if self._shard is None or self._session.communicator is None:
            return
        shards = [OptimizerShards(unwrapped(optimizer)) for optimizer in self.optimizers]
        named = list(self._module.named_parameters())
        self._sharded = ShardedOptimizers(named, shards, self._session.communicator)
        # Clipping by norm reads every gradient. They are equal on all ranks, so each rank reads its share, and the
        # ranks add up. A plugin that clips in its own way goes on doing so.
        plugin = self.precision_plugin
        if type(plugin).clip_grad_by_norm.__module__.endswith("plugins.precision.precision"):  # nobody's own
            vars(plugin)["clip_grad_by_norm"] = self._clip_by_norm

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self._sharded is not None
        self._sharded.clip_by_norm(unwrapped(optimizer), clip_val)

    @property
    @override
    def _shards(self) -> Sequence[OptimizerShards]:
        if self._sharded is None:
            return ()
        return self._sharded.shards

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of a whole optimizer; of a sharded one it is on the first rank alone. Collective then."""
        if self._sharded is None:
            return super().optimizer_state(optimizer)
        if self._interrupted:  # others may be gone; see `_can_save`
            return {}
        assert dist.group.WORLD is not None
        shards = self._sharded.of(unwrapped(optimizer))
        return whole_state_dict(shards, dist.group.WORLD, self.root_device)

    @property
    @override
    def _elsewhere(self) -> str | None:
        if self._sharded is None:
            return None
        return "with shard='optimizer' the optimizer's state is on all ranks, which may be gone"

    @override
    def _release_model(self) -> None:
        self._frozen = None
        if self._sharded is not None:
            self._sharded.close()
            vars(self.precision_plugin).pop("clip_grad_by_norm", None)

    # ---- a run ----

    @override
    def _training_starts(self) -> None:
        if self._speaks and self._session.communicator is not None:
            trainer = self._trainer
            rows = self._session.summary(_batch_size(trainer), trainer.accumulate_grad_batches)
            if self._sharded is not None:
                rows += self._sharded.describe()
            rows += [("advice", text) for text in self._fused_advice()]
            print_table("smddp: data parallelism", rows, trainer)

    def _fused_advice(self) -> list[str]:
        # With a scaler Lightning clips no fused optimizer's gradients, and sparse ones cannot be stepped so.
        is_sparse = any(getattr(layer, "sparse", False) for layer in self._module.modules())
        if self.root_device.type != "cpu" or is_sparse or getattr(self.precision_plugin, "scaler", None) is not None:
            return []
        names = {type(optimizer).__name__ for optimizer in self.optimizers if _could_be_fused(optimizer)}
        return [f"{name}(..., fused=True) passes over memory once a step: faster on CPUs" for name in sorted(names)]

    @override
    def _training_ends(self) -> None:
        if self._session.synchronizers:
            self._last_report = self._session.report()
            if self._speaks and self.world_size > 1:
                say(str(self._last_report), self._trainer)

    @override
    def _compression_state(self) -> Mapping[str, Any]:
        return self._session.state_dict()

    @override
    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        if self._sharded is None:
            super()._load_optimizers(checkpoint)
        else:
            self._sharded.load_whole_state_dicts(checkpoint["optimizer_states"])
        self._session.load_state_dict(self._saved_compression_state(checkpoint))

    @override
    def _advise(self, exception: BaseException) -> None:
        exception.args = tuple(_as_ours(argument) for argument in exception.args)


def _as_ours(argument: Any) -> Any:
    if not isinstance(argument, str) or "find_unused_parameters" not in argument:
        return argument
    named = argument.replace("strategy='ddp_find_unused", "strategy='smddp_find_unused")
    return named.replace("strategy=DDPStrategy(", "strategy=SMDDPStrategy(")


def _could_be_fused(optimizer: Optimizer) -> bool:
    """Whether torch can, and nobody has said how it is to step."""
    options = [group.get(word) for group in optimizer.param_groups for word in ("fused", "foreach")]
    return type(optimizer) in (Adam, AdamW, SGD) and all(option is None for option in options)


def _batch_size(trainer: Trainer) -> int | None:
    """Samples that one rank gets at a time, where the loader tells."""
    loader = trainer.train_dataloader
    for source in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
