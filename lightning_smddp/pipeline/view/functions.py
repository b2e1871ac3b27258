"""What hooks call above autograd: parameters become what all ranks see, and values that leave torch are fetched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_smddp._compat.torch import DispatchMode, without_torch_function
from lightning_smddp._compat.torch_steps import mode_within_backwards
from lightning_smddp.pipeline.capture.ops import Kind, asks_for_device, kind_of, name_of
from lightning_smddp.pipeline.capture.patches import user_location
from lightning_smddp.pipeline.view.tensor import GlobalTensor, GlobalViewError, View
from lightning_smddp.wire.pytree import leaves, map_leaves

# Give a tensor's memory to Python, or make something of its values that is no tensor.
_READERS = {
    "__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "__str__", "as_tensor", "data_ptr", "numpy",
    "storage", "tensor", "tolist", "untyped_storage", "share_memory_",
}  # fmt: skip


class ViewFunctions(TorchFunctionMode):
    """Sees the calls of user code in a hook."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(function)
        # Some calls have a rule of their own; all others run on stand-ins, and their operators come to ViewOperations.
        # First, values that leave torch: they are fetched, and the function gets plain tensors.
        if name in _READERS:
            args, kwargs = self.view.plain((self.view.stand_in(args), self.view.stand_in(kwargs)))
            return function(*args, **kwargs)
        attribute = getattr(function, "__name__", None)
        # `.data`, `.grad` and `.requires_grad` of a parameter are those of its stand-in, too.
        if attribute in ("__set__", "__delete__"):
            return self._set(name, attribute, function, args)
        if name == "__deepcopy__":
            shown = self.view.stand_in(args[0])
            if isinstance(shown, GlobalTensor):
                return shown.__deepcopy__(args[1])
            return function(*args, **kwargs)
        if name == "requires_grad_" and self.view.knows(args[0]):
            return self._flag(args[0], function, args, kwargs)
        if name == "grad" and attribute == "__get__" and self.view.knows(args[0]):
            return self.view.gradient(args[0])
        # What needs no values (a shape, a hook for gradients, which fires where the parameter is): the module's own.
        kind = kind_of(function, args)
        if kind is Kind.WATCHER or (kind is Kind.METADATA and not asks_for_device(name)):
            return function(*args, **kwargs)
        within: AbstractContextManager[Any] = nullcontext()
        if kind is Kind.BACKWARD:
            within = mode_within_backwards(self)
        with within:
            result = function(*self.view.stand_in(args), **self.view.stand_in(kwargs))
        if isinstance(result, GlobalTensor):  # in-place operations give the user's own object back
            return self.view.own_object(result)
        return result

    def _set(self, name: str, attribute: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        target = args[0]
        known = self.view.knows(target)
        if name == "grad" and known:
            value = None
            if attribute == "__set__":
                value = args[1]
            return self.view.set_gradient(target, value)
        if name == "requires_grad" and known:
            return self._flag(target, function, args, {})
        if name == "data" and (known or isinstance(target, GlobalTensor)):
            return self.view.set_data(target, args[1])
        return function(*args)

    def _flag(self, parameter: Tensor, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self.view.stand_in_for(parameter).requires_grad_(parameter.requires_grad)
        return result


class ViewOperations(DispatchMode):
    """Sees the operators that those calls come to, also in backward passes."""

    def __init__(self, view: View) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.view = view

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.view.run_operator(function, tuple(args), dict(kwargs or {}))


def any_leaf(predicate: Callable[[Any], bool], structure: Any) -> bool:
    """Whether ``predicate`` is true of a leaf of ``structure``."""
    return any(predicate(leaf) for leaf in leaves(structure))


def refuse_new_parameter(root: nn.Module) -> Callable[[nn.Module, str, Any], None]:
    """A hook for the registration of parameters: those of ``root`` may not be replaced in a hook."""
    modules = {id(module) for module in root.modules()}

    def hook(module: nn.Module, name: str, parameter: Any) -> None:
        if id(module) in modules and parameter is not module._parameters.get(name):
            raise GlobalViewError(
                f"Parameter {name!r} of a {type(module).__name__} is replaced by another one at {user_location()}, "
                "in a hook: a pipeline has divided the parameters that it had. Change its values "
                "(`p.data.copy_(...)`), or make the change in `__init__` or `configure_model`."
            )

    return hook


def keep_buffers(view: View) -> Callable[[nn.Module, str, Any], Any]:
    """A hook for the registration of buffers: a new value for one of the module's goes into the tensor that it has."""
    modules = {id(module) for module in view.module.modules()}

    def hook(module: nn.Module, name: str, value: Any) -> Any:
        before = module._buffers.get(name)
        if id(module) not in modules or value is before or not isinstance(value, Tensor):
            return value
        with without_torch_function():  # our own looks at tensors are not the user's
            if before is None or not view.knows(before):
                return view.plain(value)
            view.set_data(before, value)
        return before

    return hook


def map_tensors(function: Callable[[GlobalTensor], Any], structure: Any) -> Any:
    """``structure`` with ``function`` applied to its global tensors; the same object if there are none."""
    if not any_leaf(lambda leaf: isinstance(leaf, GlobalTensor), structure):
        return structure

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, GlobalTensor):
            return function(leaf)
        return leaf

    return map_leaves(mapped, structure)
