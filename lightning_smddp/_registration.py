"""Make ``strategy="smddp"`` known to Lightning: at once where Lightning is imported, else when it is.

Lightning has no entry-point group for strategies. PyTorch, however, calls every entry point of the group
``torch.backends`` at the end of ``import torch`` (torch >= 2.5, off with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), and
Lightning imports torch. :func:`autoload` is that entry point: it installs one import hook, which registers factories
in Lightning's registries right after these are created, and makes the changes of ``_compat/environments.py``. Only the
standard library is imported here, and nothing heavier until a name is used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# module that creates a registry -> (name of the registry in it, our module, class of `smddp`, whether for a Trainer)
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning", "SMDDPStrategy", True),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning", "SMDDPStrategy", True),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning", "SMDDPFabricStrategy", False),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "lightning_fabric", "SMDDPFabricStrategy", False),
}
# the other strategies of the Trainer and of Fabric: name -> (class, what it is)
_OF_TRAINER = {
    "smddp_pipeline": ("PipelineStrategy", "pipeline parallelism"),
    "smddp_fsdp": ("SMDDPFSDPStrategy", "fully sharded data parallelism"),
}
_OF_FABRIC = {"smddp_fsdp": ("SMDDPFabricFSDPStrategy", "fully sharded data parallelism")}
# module that searches for a cluster environment -> what `_compat/environments.py` does with it
_CHANGES = {
    "lightning.fabric.plugins.environments.mpi": "survive_mpi4py_without_mpi",
    "lightning_fabric.plugins.environments.mpi": "survive_mpi4py_without_mpi",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "ask_our_strategies",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "ask_our_strategies",
    "lightning.fabric.connector": "ask_our_strategies",
    "lightning_fabric.connector": "ask_our_strategies",
    "lightning.pytorch.cli": "know_our_classes",
    "pytorch_lightning.cli": "know_our_classes",
}
# Endings of names -> arguments, as Lightning has them for `ddp` and `deepspeed`.
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_STAGES: dict[str, dict[str, Any]] = {
    "": {},
    "_stage_1": {"stage": 1},
    "_stage_2": {"stage": 2},
    "_stage_3": {"stage": 3},
}


def _variants() -> dict[str, dict[str, Any]]:
    """Every name that Lightning has for ``ddp``, with the same meaning."""
    names: dict[str, dict[str, Any]] = {}
    for suffix, start_method in _START_METHODS.items():
        name = f"smddp{suffix}"
        names[name] = {"start_method": start_method}
        for flag in (False, True):
            key = f"{name}_find_unused_parameters_{str(flag).lower()}"
            names[key] = {"start_method": start_method, "find_unused_parameters": flag}
    return names


def _factory(home: str, class_name: str) -> Callable[..., Any]:
    def create(**init_params: Any) -> Any:
        # Not before a Trainer or Fabric is made: the module imports Lightning, which is being imported now.
        module = import_module(f"lightning_smddp.strategies.{home}")
        return getattr(module, class_name)(**init_params)

    return create


def register(module: ModuleType) -> None:
    """Register all ``smddp`` names in the registry that ``module`` created; a second call changes nothing."""
    attribute, home, data_parallel, is_trainers = _REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)
    if registry is None:  # the module is still being executed; its loader calls again when it is done
        return

    def add(name: str, class_name: str, what: str, arguments: dict[str, Any]) -> None:
        if name not in registry:
            registry.register(name, _factory(home, class_name), description=f"{what}, {arguments}", **arguments)

    for name, arguments in _variants().items():
        add(name, data_parallel, "data parallelism", arguments)
    others = _OF_FABRIC
    if is_trainers:
        others = _OF_TRAINER
    for name, (class_name, what) in others.items():
        for suffix, start_method in _START_METHODS.items():
            add(f"{name}{suffix}", class_name, what, {"start_method": start_method})
    if is_trainers:
        for suffix, arguments in _STAGES.items():
            add(f"smddp_deepspeed{suffix}", "SMDDPDeepSpeedStrategy", "DeepSpeed's ZeRO", arguments)


def change(module: ModuleType) -> None:
    """Do with ``module`` what the two tables say; a second call changes nothing."""
    if module.__name__ in _REGISTRIES:
        register(module)
    else:
        changes = import_module("lightning_smddp._compat.environments")
        change_it = getattr(changes, _CHANGES[module.__name__])
        change_it(module)


class _RegisteringLoader(Loader):
    """Execute a module with its own loader, then register in it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # Nothing of us stays on the module: whoever asks it for its loader, to read its source say, gets its own.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            change(module)
        except Exception as error:  # a Lightning that we do not know must not break for it
            warnings.warn(
                f"lightning_smddp could not register in {module.__name__}: {type(error).__name__}: {error}",
                stacklevel=2,
            )


class _RegistryFinder(MetaPathFinder):
    """Wrap the loaders of the modules in the two tables; every other import passes untouched."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES and fullname not in _CHANGES:
            return None
        # The finders behind this one are asked as the import system would ask them. What one of them finds stays as it
        # is, but for the loader, which executes the module and then registers in it.
        for finder in sys.meta_path:
            if isinstance(finder, _RegistryFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


def install() -> None:
    """Register in every Lightning that is imported already, and in the others as soon as they are."""
    for name in (*_REGISTRIES, *_CHANGES):
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
