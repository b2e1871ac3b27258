"""Changes to Lightning's search for cluster environments, and for classes, made when its modules are imported.

Nothing is imported here before it is needed: see ``_registration.py``.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType
from typing import Any


def survive_mpi4py_without_mpi(module: ModuleType) -> None:
    """Let ``MPIEnvironment.detect`` answer False, with a warning, where mpi4py finds no MPI library.

    It catches ``ImportError`` alone, and mpi4py 4.1 raises ``RuntimeError``, which no Trainer survives, whatever its
    strategy. Remove when the oldest supported Lightning catches it.
    """
    environment: Any = getattr(module, "MPIEnvironment", None)
    if environment is None or environment.detect.__module__ == __name__:  # too early, or done
        return
    detect = environment.detect

    def guarded() -> bool:
        try:
            return bool(detect())
        except (ImportError, RuntimeError) as error:
            first_line, _, _ = str(error).strip().partition("\n")
            warnings.warn(
                f"mpi4py is installed, but cannot be used ({first_line}), so it is not asked whether mpirun started "
                "this process. Install an MPI library, or uninstall mpi4py.",
                stacklevel=2,
            )
            return False

    environment.detect = staticmethod(guarded)


def ask_our_strategies(module: ModuleType) -> None:
    """Let our strategies choose the cluster environment, unless the user gives one.

    Lightning's connectors choose it before there is a strategy, and do not say afterwards whether it was given.
    Remove when a strategy is asked.
    """
    connector: Any = getattr(module, "_AcceleratorConnector", None)  # the Trainer's
    if connector is None:
        connector = getattr(module, "_Connector", None)  # Fabric's
    if connector is None or connector._choose_and_init_cluster_environment.__module__ == __name__:  # too early, or done
        return
    choose = connector._choose_and_init_cluster_environment

    def choose_environment(self: Any) -> Any:
        home = _home(self._strategy_flag, module.__name__)
        is_given = isinstance(self._cluster_environment_flag, module.ClusterEnvironment)
        if home is None or is_given:
            return choose(self)
        # Our strategies import Lightning, which is being imported while this function is put there: so not before now.
        environments = import_module("lightning_smddp.strategies.environments")
        classes = import_module(f"lightning_smddp.strategies.{home}")
        environment = environments.choose(classes)
        if environment is None:
            return choose(self)
        return environment

    connector._choose_and_init_cluster_environment = choose_environment


def know_our_classes(module: ModuleType) -> None:
    """Import our strategies with LightningCLI, which finds the short name of a class among those that are imported.

    So ``class_path: SMDDPStrategy`` works as ``DDPStrategy`` does. Remove when LightningCLI has a registry of classes.
    """
    if hasattr(module, "LightningCLI"):  # else too early
        package = "pytorch_lightning"
        if module.__name__.startswith("lightning."):
            package = "lightning"
        import_module(f"lightning_smddp.strategies.{package}")


def _home(strategy: Any, connector: str) -> str | None:
    """The module with our environments that suit a connector; None for the strategies of others."""
    if isinstance(strategy, str):
        ours = strategy.startswith("smddp")
    else:
        ours = any(cls.__module__.startswith("lightning_smddp.") for cls in type(strategy).__mro__)
    if not ours:
        return None
    if connector.startswith("lightning."):
        return "lightning"
    return "lightning_fabric"
