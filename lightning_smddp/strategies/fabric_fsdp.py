"""``Fabric(strategy="smddp_fsdp")``: the sharding of ``strategies/fsdp.py`` in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.pipeline.state.meta_parameters import parameters_on_meta
from lightning_smddp.pytree import tensors
from lightning_smddp.sharding.optimizer_shards import all_parameters
from lightning_smddp.sharding.whole_states import divided_model_state, gathered_model, gathered_optimizer
from lightning_smddp.strategies.checks import require_optimizers_of, require_supported_by_fsdp
from lightning_smddp.strategies.fabric import FabricStrategy
from lightning_smddp.strategies.fsdp import FromFSDP, ShardedFront
from lightning_smddp.strategies.fsdp_scheme import FSDPScheme
from lightning_smddp.strategies.options import StrategyOptions


class DividedForward(nn.Module):
    """What stands for a divided module in Fabric's wrapper: around its forward, the root's parameters are whole.

    Attributes:
        module: the user's.
        scheme: how it is divided.
        was_called: for a backward pass.
        is_hidden: FSDP2 does not see all that it returned last.
    """

    def __init__(self, module: nn.Module, scheme: FSDPScheme) -> None:
        super().__init__()
        self.module = module
        self.scheme = scheme
        self.was_called = self.is_hidden = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own ``forward``, on whole parameters. Collective: units are gathered as it comes to them."""
        trains = torch.is_grad_enabled()
        self.was_called |= trains
        with self.scheme.forward(trains):
            output = self.module(*args, **kwargs)
        if trains:  # FSDP2 sees no tensors in objects of the user's, nor views that are written to in place
            found = [tensor for tensor in tensors(output) if tensor.requires_grad]
            self.is_hidden = not found or any(tensor._base is not None for tensor in found)
        return output


class _SyncControl:
    """Without it Fabric refuses ``fabric.no_backward_sync``: it asks the strategy for this object."""

    def no_backward_sync(self, module: DividedForward, enabled: bool) -> AbstractContextManager[None]:
        """Gradients of backward passes in this context stay on their ranks."""
        return module.scheme.sharded.accumulating() if enabled else nullcontext()


class FabricFullyShardedParallel(ShardedFront, FabricStrategy):
    """Parameters, gradients and optimizer states divided among ranks, for Fabric.

    Arguments as those of ``SMDDPFSDPStrategy``; by position those of Fabric's ``DDPStrategy`` can be given, in its
    order. ``resume``, of ``communication`` how batches count, and of ``reliability`` what is about stops and
    checkpoints are the Trainer's, and refused.

    ``fabric.setup(model, optimizer)`` divides the model and lets the optimizer have its parts. What the script computes
    of parameters and gradients is computed of whole values: on all ranks, never on one alone.
    """

    # What code sees of a divided tensor, from the first module's set-up to the end:
    #   the script, forward passes, a closure                 gathered values
    #   dividing, backward passes, clipping, checkpoints      this rank's shares
    #   optimizers' steps                                     shares; gathered values if they look at whole parameters

    _known: Iterable[str] = {*FromFSDP.__annotations__, "precision"} - {"precision_plugin"}

    def _hold_parts(self, options: StrategyOptions, close: Callable[[], None] | None = None) -> None:
        super()._hold_parts(options, close)
        self._backward_sync_control: Any = _SyncControl()
        self._changes = ExitStack()
        self._modules: list[DividedForward] = []  # that were set up

    # ---- set-up ----

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing, as in Lightning's own sharded strategies: shares go to the device when the module is divided."""

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``meta_init`` or ``empty_init=True``: parameters get no memory before they are divided."""
        with super().module_init_context(empty_init=False), parameters_on_meta(bool(empty_init) or self._meta_init):
            yield

    def setup_module(self, module: nn.Module) -> DividedForward:  # type: ignore[override]
        """Divide ``module``. Collective; ``ValueError`` on every rank if models differ."""
        require_supported_by_fsdp(module)
        with self._view.inside(False):
            scheme = FSDPScheme(
                module, self._sharding, self.precision, self._view, self.root_device, self.num_processes, self._limit
            )
        if not self._modules:  # from here on the script sees gathered values wherever it is
            self._changes.enter_context(self._view.installed())
            self._changes.enter_context(self._view.inside())
        divided = DividedForward(module, scheme)
        self._modules.append(divided)
        self._print("smddp_fsdp: fully sharded data parallelism", scheme.describe())
        return divided

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Divide ``module``; optimizers of its parameters get what these have become."""
        # Dividing puts other objects in the place of parameters. By their names the optimizers get what theirs have
        # become; states that they had (of training before the set-up, say) are divided likewise.
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        states = [optimizer.state_dict() for optimizer in optimizers]
        divided = self.setup_module(module)
        parts = dict(module.named_parameters())
        for optimizer, state in zip(optimizers, states, strict=True):
            for group in optimizer.param_groups:  # parameters of other modules stay
                group["params"] = [parts.get(names.get(id(p), ""), p) for p in group["params"]]
            optimizer.state.clear()
            self.setup_optimizer(optimizer)
            optimizer.load_state_dict(state)
        return divided, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let ``optimizer`` step shares from here on.

        Raises:
            ValueError: it has parameters of no module that was set up.
        """
        optimizer = super().setup_optimizer(optimizer)
        load: Any = self._of(optimizer).load_state_dict
        optimizer.load_state_dict = load  # type: ignore[method-assign]  # the script may call it, too
        return optimizer

    def _schemes_of(self, optimizer: Optimizer) -> list[FSDPScheme]:
        require_optimizers_of(self._modules, [optimizer])
        own = set(all_parameters(optimizer))
        return [divided.scheme for divided in self._modules if not own.isdisjoint(divided.parameters())]

    # ---- steps ----

    @contextmanager
    def _averaging(self, loss: Tensor) -> Iterator[None]:
        # With several modules FSDP2 sees by what their forwards have returned which of them have to do with the pass;
        # one that has nothing to do with it costs a message.
        is_alone = len(self._modules) == 1
        called = [divided for divided in self._modules if divided.was_called]
        with self._view.inside(False):
            for divided in called:
                divided.scheme.sharded.before_backward(loss, watches=is_alone or divided.is_hidden)
            yield
            for divided in called:
                divided.scheme.after_backward(self._looks)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Look at the gradients as the user's code has left them, then step."""
        closure = kwargs.get("closure")
        if closure is not None:
            kwargs["closure"] = self._view.inside()(closure)  # a context as a decorator
        return super().optimizer_step(optimizer, *args, **kwargs)

    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """Clip by the norm of the gradients of all ranks' shares. Collective."""
        stepped = self._of(optimizer)
        with self._view.inside(False):
            self.precision.unscale_gradients(optimizer)
            return stepped.clip_by_norm(*args, **kwargs)

    # ---- checkpoints: those of one process ----

    def _all_divided(self) -> AbstractContextManager[None]:
        for divided in self._modules:
            divided.scheme.sharded.reshard()
        return self._view.inside(False)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """One plain file, by global rank 0. Collective."""
        with self._all_divided():
            super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load such a file, of any strategy."""
        with self._all_divided():
            return super().load_checkpoint(*args, **kwargs)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole module's state, on global rank 0. Collective."""
        with self._all_divided():
            return gathered_model(_inner(module).state_dict(keep_vars=True), lambda number: self.is_global_zero)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a whole module's state."""
        inner = _inner(module)
        inner.load_state_dict(divided_model_state(inner, state_dict), strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state, on global rank 0. Collective."""
        with self._all_divided():
            return gathered_optimizer(optimizer.state_dict(), lambda number: self.is_global_zero)

    # ---- the end ----

    def teardown(self) -> None:
        """Give back whole modules, and free shared memory."""
        self._changes.close()
        for stepped in self._stepped:
            vars(stepped.optimizer).pop("load_state_dict", None)
        self._close_stepped()
        for divided in self._modules:
            divided.scheme.make_whole()
            divided.scheme.close()
        self._modules = []
        super().teardown()


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DividedForward) else module
