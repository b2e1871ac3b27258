"""Lightning's search for cluster environments asks our strategies; made when its modules are imported.

Nothing is imported here before it is needed: see ``_registration.py``.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


def ask_our_strategies(module: ModuleType) -> None:
    """Let our strategies choose the cluster environment, unless the user gives one.

    Lightning's connectors choose it before there is a strategy, and do not say afterwards whether it was given.
    Remove when a strategy is asked.
    """
    connector: Any = getattr(module, "_AcceleratorConnector", getattr(module, "_Connector", None))  # or Fabric's
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
