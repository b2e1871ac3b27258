"""Make ``strategy="smddp"`` known to Lightning: at once where Lightning is imported, else when it is.

Lightning has no entry-point group for strategies. PyTorch, however, calls every entry point of the group
``torch.backends`` at the end of ``import torch`` (torch >= 2.5, off with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), and
Lightning imports torch. :func:`autoload` is that entry point: it installs one import hook, which registers factories
in Lightning's registries right after these are created, and makes the change of ``_compat/environments.py``. Only the
standard library is imported here, and nothing heavier until a name is used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_OF_TRAINER = {
    "smddp": "SMDDPStrategy",
    "smddp_pipeline": "PipelineStrategy",
    "smddp_fsdp": "SMDDPFSDPStrategy",
    "smddp_deepspeed": "SMDDPDeepSpeedStrategy",
}
_OF_FABRIC = {"smddp": "SMDDPFabricStrategy", "smddp_fsdp": "SMDDPFabricFSDPStrategy"}
# module that creates a registry -> (name of the registry in it, our module, its classes)
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning", _OF_TRAINER),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning", _OF_TRAINER),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning", _OF_FABRIC),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "lightning_fabric", _OF_FABRIC),
}
# modules that search for a cluster environment
_CONNECTORS = (
    "lightning.pytorch.trainer.connectors.accelerator_connector",
    "pytorch_lightning.trainer.connectors.accelerator_connector",
    "lightning.fabric.connector",
    "lightning_fabric.connector",
)
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def _variants(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The endings that Lightning has for ``ddp``, and those of ``deepspeed``'s stages, with the same meaning."""
    if name == "smddp_deepspeed":
        yield name, {}
        for stage in (1, 2, 3):
            yield f"{name}_stage_{stage}", {"stage": stage}
        return
    for suffix, start_method in _START_METHODS.items():
        yield f"{name}{suffix}", {"start_method": start_method}
        for flag in (False, True) if name == "smddp" else ():
            options = {"start_method": start_method, "find_unused_parameters": flag}
            yield f"{name}{suffix}_find_unused_parameters_{str(flag).lower()}", options


def _factory(home: str, class_name: str) -> Callable[..., Any]:
    def create(**init_params: Any) -> Any:
        # Not before a Trainer or Fabric is made: the module imports Lightning, which is being imported now.
        module = import_module(f"lightning_smddp.strategies.{home}")
        return getattr(module, class_name)(**init_params)

    return create


def register(module: ModuleType) -> None:
    """Register our names in the registry of ``module``; those that are there already stay."""
    attribute, home, classes = _REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)
    if registry is None:  # the module is still being executed; its loader calls again when it is done
        return
    for word, class_name in classes.items():
        for name, arguments in _variants(word):
            if name not in registry:
                registry.register(name, _factory(home, class_name), **arguments)


def change(module: ModuleType) -> None:
    """Register in ``module``, or let it ask our strategies for an environment; a second call changes nothing."""
    if module.__name__ in _REGISTRIES:
        register(module)
    else:
        import_module("lightning_smddp._compat.environments").ask_our_strategies(module)


def _change_behind(loader: Any) -> None:
    """Let ``loader`` change the module that it executes next. Nothing of us stays on it, nor on the module."""

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        try:
            change(module)
        except Exception as error:  # a Lightning that we do not know must not break for it
            warnings.warn(
                f"lightning_smddp could not register in {module.__name__}: {type(error).__name__}: {error}",
                stacklevel=2,
            )

    loader.exec_module = exec_module


class _RegistryFinder(MetaPathFinder):
    """Hears of the imports of the modules above; every other import passes untouched."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES and fullname not in _CONNECTORS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _change_behind(spec.loader)
        return spec


def install() -> None:
    """Register in every Lightning that is imported already, and in the others as soon as they are."""
    for name in (*_REGISTRIES, *_CONNECTORS):
        if name in sys.modules:
            change(sys.modules[name])
    if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def autoload() -> None:
    """Entry point of the group ``torch.backends``: as :func:`install`, but never breaks ``import torch``."""
    try:
        install()
    except Exception as error:
        warnings.warn(f"lightning_smddp could not register its strategies: {error!r}", stacklevel=2)
