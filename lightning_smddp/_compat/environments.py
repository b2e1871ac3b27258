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
        is_given = isinstance(self._cluster_environment_flag, module.ClusterEnvironment)
        if is_given or not _is_ours(self._strategy_flag):
            return choose(self)
        environments = import_module("lightning_smddp.strategies.environments")
        module.ClusterEnvironment.register(environments.LaunchEnvironment)
        environment = environments.choose(module.LightningEnvironment)
        return choose(self) if environment is None else environment

    connector._choose_and_init_cluster_environment = choose_environment


def _is_ours(strategy: Any) -> bool:
    if isinstance(strategy, str):
        return strategy.startswith("smddp")
    return any(cls.__module__.startswith("lightning_smddp.") for cls in type(strategy).__mro__)
