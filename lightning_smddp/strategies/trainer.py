"""``Trainer(strategy="smddp")``: Lightning's DDPStrategy with our communication hook.

Written once for both packages that Lightning is published as; ``lightning.py`` and ``pytorch_lightning.py`` put it on
top of their ``DDPStrategy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightning_smddp._compat import register_ddp_comm_hook
from lightning_smddp.communication.algorithms import AlgorithmName
from lightning_smddp.communication.compression import Compression, Method
from lightning_smddp.communication.nonfinite import bad_gradients
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.strategies.exact_resume import ExactResume
from lightning_smddp.strategies.guarded import Guarded
from lightning_smddp.strategies.layouts import Place
from lightning_smddp.strategies.nonfinite import by_asking, by_watch
from lightning_smddp.strategies.option_checks import require_arguments_of_ddp, require_known
from lightning_smddp.strategies.reductions import mean_by_sum
from lightning_smddp.strategies.reliability import OnNonfinite, ReliabilityOptions
from lightning_smddp.strategies.sagemaker_folders import SageMakerFolders
from lightning_smddp.strategies.session import Options, Session, check_devices, finish_wrapping
from lightning_smddp.strategies.sharded import ShardedSaving
from lightning_smddp.strategies.supervised import Supervised
from lightning_smddp.strategies.tables import print_table, say

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_CHECKPOINT_KEY = "smddp"


class TrainerDataParallel(SageMakerFolders, Supervised, Guarded, ShardedSaving):
    """Data parallelism with optimized all-reduce; a drop-in for ``DDPStrategy``.

    Args:
        algorithm: how gradients are summed: ``"native"`` (the backend's all-reduce), ``"shared_memory"`` (CPU ranks
            of one node, without copies), ``"hierarchical"`` (inside nodes first, then between ranks of equal local
            rank), ``"balanced"`` (balanced fusion buffers between nodes), or ``"auto"``: the fastest on this
            cluster for each bucket size, measured at the start of fit.
        compression: of gradients between nodes: None (exact), ``"bf16"``, ``"fp16"``, ``"int8"``, ``"powersgd"``, or a
            :class:`~lightning_smddp.Compression` with details.
        bucket_cap_mb: size of DDP's buckets in MiB; None has it chosen with the algorithm.
        process_group_backend: ``"auto"`` is ``nccl`` on CUDA and ``gloo`` on CPU.
        collective_timeout: how long a rank waits for the others in a collective, in seconds or as a timedelta; None
            is DDP's ``timeout``, which also bounds the start.
        tuning_cache: file for what ``"auto"`` measured; True is ``~/.cache/lightning_smddp/plans.json``, False
            measures at each start.
        verbose: print a table at the start of fit and a report at its end.
        init_timeout: how long ranks wait for each other at the start, in seconds or as a timedelta; None is 10
            minutes, or ``timeout`` if that is less.
        stop_grace: seconds from SIGTERM to the end of the process, checkpoint included.
        resume: ``"auto"`` continues from the newest valid checkpoint when ``fit`` is not given one, as after a restart
            by torchrun, Slurm or SageMaker; ``"never"`` starts from scratch then. None is ``"auto"`` in a SageMaker
            job, else ``"never"``.
        on_nonfinite: when a gradient is NaN or infinite on any rank: ``"error"`` names rank, step and parameter,
            ``"skip"`` leaves this step out on all ranks, ``"ignore"`` does not look.
        async_save: write checkpoints in the background, from a copy.
        sharded: save a directory with a file of each rank, instead of one file gathered on rank 0.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, ddp_comm_state,
            ddp_comm_hook, ddp_comm_wrapper, model_averaging_period, timeout, start_method: as of ``DDPStrategy``, in
            its order; only they can be given by position.
        **kwargs: all arguments of ``DistributedDataParallel``. ``gradient_as_bucket_view`` is on unless given.

    Raises:
        ValueError: an argument is not one of the valid values; the message lists them.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Any = None,
        ddp_comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = "auto",
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        algorithm: AlgorithmName = "auto",
        compression: Method | Compression | None = None,
        bucket_cap_mb: float | None = None,
        collective_timeout: timedelta | float | None = None,
        tuning_cache: str | Path | bool = True,
        verbose: bool = True,
        init_timeout: timedelta | float | None = None,
        stop_grace: timedelta | float = 90.0,
        resume: Literal["auto", "never"] | None = None,
        on_nonfinite: OnNonfinite = "error",
        async_save: bool = False,
        sharded: bool = False,
        **kwargs: Any,
    ) -> None:
        options = Options.parse(
            algorithm,
            compression,
            bucket_cap_mb,
            process_group_backend,
            collective_timeout,
            tuning_cache,
            verbose,
        )
        reliability = ReliabilityOptions.parse(init_timeout, stop_grace, resume, on_nonfinite, async_save, sharded)
        if ddp_comm_hook is not None and (algorithm != "auto" or compression is not None):
            raise ValueError(
                f"`ddp_comm_hook` replaces our communication, so algorithm={algorithm!r} and "
                f"compression={compression!r} would have no effect. Give either the hook or these."
            )
        require_known(self, kwargs)
        require_arguments_of_ddp(accelerator, timeout)
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook, ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period, process_group_backend=options.process_group_backend,
            timeout=timeout, start_method=start_method, **kwargs,
        )  # fmt: skip
        self._session = Session(options)
        self._reliability = reliability
        self._exact_resume = ExactResume()
        self._user_ddp_kwargs = dict(self._ddp_kwargs)

    @property
    def communication_report(self) -> CommunicationReport | None:
        """What gradient communication cost so far; None before fit. Collective: read it on every rank."""
        return self._session.report() if self._session.synchronizers else self._last_report

    _last_report: CommunicationReport | None = None

    def setup_environment(self) -> None:
        """Start the process group, after a look at what the launcher started."""
        environment = self.cluster_environment
        check_devices(self.num_processes, environment is not None and environment.creates_processes_externally)
        super().setup_environment()
        self._session.process_group_started()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            self._exact_resume.before_setup(self.lightning_module.trainer, self._reliability.resume, self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model and set up optimizers."""
        fits = trainer.state.fn == "fit"
        if fits:
            self.require_no_links(trainer)
        super().setup(trainer)
        if fits:
            self._exact_resume.start(trainer, Place(self.global_rank, 0, self.world_size, 1), self.root_device)

    def configure_ddp(self) -> None:
        """Choose the communication and wrap the model."""
        if self._ddp_comm_hook is None:
            assert self.model is not None
            self._ddp_kwargs = self._session.prepare(self.model, self.root_device, self._user_ddp_kwargs, self._timeout)
            watch = self._session.synchronizers[-1].watch
            watch.on, watch.marks = self._watches_gradients, not self._changes_gradients
        elif self._session.options.bucket_cap_mb is not None:
            self._ddp_kwargs = {**self._user_ddp_kwargs, "bucket_cap_mb": self._session.options.bucket_cap_mb}
        super().configure_ddp()
        finish_wrapping(self.root_device)

    def _find_nonfinite(self) -> Mapping[str, str] | None:
        if self._session.synchronizers and self._session.synchronizers[-1].watch.marks:
            return by_watch(self._session.synchronizers[-1].watch)
        assert self.lightning_module is not None  # a hook of the user's own averages
        return by_asking(bad_gradients(self.lightning_module.named_parameters()), self.root_device)

    @property
    def _has_equal_gradients(self) -> bool:
        return bool(self._session.synchronizers)

    def _brought(self) -> Mapping[str, str]:
        return self._session.synchronizers[-1].watch.take_findings() if self._session.synchronizers else {}

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a tensor over ranks; a mean is SUM, then division, as not every backend knows AVG."""
        return mean_by_sum(super().reduce, tensor, group, reduce_op)

    def on_train_start(self) -> None:
        """Say what runs."""
        super().on_train_start()
        self._session.settle_buckets(self.model, self._exact_resume.saved("bucket_order"))
        self._exact_resume.on_train_start()
        if self._session.options.verbose and self.is_global_zero and self._session.communicator is not None:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            rows = self._session.summary(_batch_size(trainer), trainer.accumulate_grad_batches)
            print_table("smddp: data parallelism", rows, trainer)

    def on_train_end(self) -> None:
        """Say what it cost."""
        super().on_train_end()
        if self._session.synchronizers:
            trainer = cast(Any, self.lightning_module).trainer
            self._last_report = self._session.report()
            if self._session.options.verbose and self.is_global_zero and self.world_size > 1:
                say(str(self._last_report), trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with what compression remembers, and what it takes to go on exactly."""
        self._exact_resume.add_to(checkpoint, {"bucket_order": self._session.bucket_order()})
        compression = self._session.options.compression
        if compression is not None and "optimizer_states" in checkpoint and not self._interrupted():
            state = self._session.state_dict()
            if state:
                checkpoint[_CHECKPOINT_KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore the optimizers, and what compression remembers."""
        super().load_optimizer_state_dict(checkpoint)
        self._exact_resume.take(checkpoint)
        self._session.load_state_dict(checkpoint.get(_CHECKPOINT_KEY, {}))

    def on_exception(self, exception: BaseException) -> None:
        """Let Lightning's advice on unused parameters name this strategy."""
        super().on_exception(exception)
        exception.args = tuple(_as_ours(argument) for argument in exception.args)

    def teardown(self) -> None:
        """Free shared memory, threads and sockets."""
        self._exact_resume.close()
        self._session.close()
        super().teardown()

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        if self._ddp_comm_hook is not None:  # on CPU too, where DDPStrategy ignores it
            register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)
        else:
            self._session.attach(self.model)


def _as_ours(argument: Any) -> Any:
    if not isinstance(argument, str) or "find_unused_parameters" not in argument:
        return argument
    named = argument.replace("strategy='ddp_find_unused", "strategy='smddp_find_unused")
    return named.replace("strategy=DDPStrategy(", "strategy=SMDDPStrategy(")


def _batch_size(trainer: Trainer) -> int | None:
    """Samples that one rank gets at a time, where the loader tells."""
    loader = trainer.train_dataloader
    for source in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
