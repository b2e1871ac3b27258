"""Lightning's connectors ask our strategies for cluster environments, and name them where it knows no such strategy.

Both are made when its modules are imported.

Nothing is imported here before it is needed: see ``_registration.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

_WORDS = (
    "lightning_smddp has 'smddp', 'smddp_pipeline', 'smddp_fsdp' and 'smddp_deepspeed' for the Trainer; for Fabric, in "
    "whose loop there is no step that a pipeline could cut, 'smddp' and 'smddp_fsdp' (SMDDPFabricStrategy, "
    "SMDDPFabricFSDPStrategy)."
)


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
    connector._check_config_and_set_final_flags = _naming_ours(connector._check_config_and_set_final_flags)


def _naming_ours(check: Callable[..., None]) -> Callable[..., None]:
    """Lightning's ``check``, whose error names our strategies where one of them may be meant."""

    def check_config(self: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
        try:
            check(self, strategy, *args, **kwargs)
        except ValueError as error:
            ours = [known for known in self._registered_strategies if known.startswith("smddp")]
            name = strategy.lower().replace("-", "_") if isinstance(strategy, str) else ""
            close = get_close_matches(name, ours, 1, cutoff=0.75)
            is_ours = _is_ours(name or strategy) or close and name[0] == "s"  # not: deepspeed_stage_4
            if "invalid strategy name" not in str(error) or not is_ours:
                raise
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{error}.{meant} {_WORDS}") from None

    return check_config


def _is_ours(strategy: Any) -> bool:
    if isinstance(strategy, str):
        return strategy.startswith("smddp")
    return any(cls.__module__.startswith("lightning_smddp.") for cls in type(strategy).__mro__)
