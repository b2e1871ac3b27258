"""``strategy="smddp"`` is known without an import of ours, whatever is imported first, and costs nothing."""

from __future__ import annotations

import copy
import importlib
import importlib.resources
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import lightning_smddp
import lightning_smddp.strategies.lightning
import lightning_smddp.strategies.lightning_fabric
import lightning_smddp.strategies.pytorch_lightning  # here, as torch sets environment variables
from lightning_smddp import _registration
from tests.programs import ROOT
from tests.strategies.grouped import grouped

NAMES = [
    f"{name}{flag}"
    for name in ("smddp", "smddp_spawn", "smddp_fork", "smddp_notebook")
    for flag in ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
]


def python(script: str, **environment: str) -> str:
    """Run ``script`` in a new interpreter; its output."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    env = {**os.environ, "NAMES": ",".join(NAMES), **environment}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- in new interpreters ----

# With `lightning`: the script of tests/strategies/test_launchers.py, before it starts itself again.
NO_IMPORT = """
    import os, sys
    from {pytorch} import Trainer
    from {pytorch}.strategies import StrategyRegistry
    from {fabric} import Fabric
    from {fabric}.strategies import STRATEGY_REGISTRY
    assert "lightning_smddp.strategies" not in sys.modules, "too much is imported"
    names = os.environ["NAMES"].split(",")
    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        assert set(names) <= set(registry.available_strategies())
    trainer = Trainer(strategy="smddp", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy).__name__ == "SMDDPStrategy"
    assert isinstance(trainer.strategy, __import__("{pytorch}.strategies", fromlist=["DDPStrategy"]).DDPStrategy)
    fabric = Fabric(strategy="smddp", accelerator="cpu", devices=1)
    assert type(fabric.strategy).__name__ == "SMDDPFabricStrategy"
    assert isinstance(fabric.strategy, __import__("{fabric}.strategies", fromlist=["DDPStrategy"]).DDPStrategy)
    print(type(trainer.strategy).__module__, type(fabric.strategy).__module__)
"""


@pytest.mark.exhaustive
def test_pytorch_lightning_without_an_import_of_ours() -> None:
    output = python(NO_IMPORT.format(pytorch="pytorch_lightning", fabric="lightning_fabric"))
    modules = ["lightning_smddp.strategies.pytorch_lightning", "lightning_smddp.strategies.lightning_fabric"]
    assert output.split()[-2:] == modules


# As much of Lightning as a registration sees: the real one takes ten seconds to import.
STAND_IN = """
class Registry(dict):
    def register(self, name, factory, **arguments):
        self[name] = factory

STRATEGY_REGISTRY = Registry()
"""


def test_without_autoload_an_import_registers_before_and_after_lightning_and_reload(tmp_path: Path) -> None:
    (tmp_path / "lightning_fabric").mkdir()
    (tmp_path / "lightning_fabric" / "__init__.py").touch()
    (tmp_path / "lightning_fabric" / "strategies.py").write_text(STAND_IN)
    output = python(
        """
        import importlib, os, sys
        names = set(os.environ["NAMES"].split(","))
        module, name = "lightning_fabric.strategies", "STRATEGY_REGISTRY"

        def registered():
            return names & set(getattr(importlib.import_module(module), name))

        assert registered() == set(), "not off"
        import lightning_smddp
        assert registered() == names  # Lightning came first
        before = getattr(sys.modules.pop(module), name)
        assert getattr(importlib.import_module(module), name) is not before
        assert registered() == names  # we came first
        before = getattr(sys.modules[module], name)
        assert getattr(importlib.reload(sys.modules[module]), name) is not before
        assert registered() == names
        print(sys.modules[module].__file__, "torch" in sys.modules)
        """,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    assert output.split() == [str(tmp_path / "lightning_fabric" / "strategies.py"), "False"]


def test_an_error_of_ours_does_not_break_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no registration today")

    monkeypatch.setattr(_registration, "install", fail)
    with pytest.warns(UserWarning, match=r"could not register its strategies: RuntimeError\('no registration today'\)"):
        _registration.autoload()


def test_the_import_is_light() -> None:
    output = python(
        """
        import sys, time
        import importlib.abc, importlib.util, typing, warnings  # what torch has imported by then
        start = time.process_time()
        import lightning_smddp
        lightning_smddp._registration.autoload()
        spent = time.process_time() - start
        heavy = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy"} & set(sys.modules)
        assert not heavy, heavy
        assert "SMDDPStrategy" in dir(lightning_smddp)
        start = time.process_time()
        for _ in range(100):
            lightning_smddp._registration.autoload()
        print(round(1e6 * spent), round(1e4 * (time.process_time() - start)))
        """
    )
    first, again = map(int, output.split())
    print(f"import and autoload take {first} us of CPU time, autoload again {again} us")
    assert first < 5000
    assert again < 500


OF_OTHERS = {
    f"{name}{suffix}": start_method
    for name in ("smddp_pipeline", "smddp_fsdp")
    for suffix, start_method in {"": "popen", "_fork": "fork", "_notebook": "fork", "_spawn": "spawn"}.items()
}


# ---- in this one, where torch's autoload registered the names ----


@pytest.mark.parametrize("module", list(_registration._REGISTRIES))
def test_all_names(module: str) -> None:
    registry = getattr(importlib.import_module(module), _registration._REGISTRIES[module][0])
    others, stages = {name: method for name, method in OF_OTHERS.items() if "fsdp" in name}, {}
    if "smddp_deepspeed" in _registration._REGISTRIES[module][2]:  # the Trainer's
        others = OF_OTHERS
        stages = {"smddp_deepspeed": 2, **{f"smddp_deepspeed_stage_{stage}": stage for stage in (1, 2, 3)}}
    names = [name for name in registry.available_strategies() if name.startswith("smddp")]
    assert sorted(names) == sorted([*NAMES, *others, *stages])
    for name, stage in stages.items():
        assert registry.get(name).config["zero_optimization"]["stage"] == stage
    for name in others:
        assert registry.get(name)._start_method == OF_OTHERS[name]
    for name in NAMES:
        strategy = registry.get(name)
        flag = {"true": True, "false": False}.get(name.rpartition("_")[2])
        stock = name.replace("smddp", "ddp")
        if stock in registry:  # Fabric has not all of them
            assert registry.get(stock)._start_method == strategy._start_method
        assert strategy._start_method == {"spawn": "spawn", "fork": "fork", "notebook": "fork"}.get(
            name.removeprefix("smddp").strip("_").split("_")[0], "popen"
        )
        assert strategy._ddp_kwargs.get("find_unused_parameters") is flag


@pytest.mark.parametrize(
    ("connector", "strategy", "said"),
    [
        ("Trainer", "smdpp", "Did you mean 'smddp'? lightning_smddp has 'smddp', 'smddp_pipeline'"),
        ("Trainer", "SMDDP-pipeline", "Did you mean 'smddp_pipeline'?"),
        ("Trainer", "deepspeed_stage_4", ""),
        ("Fabric", "smddp_pipeline", "no step that a pipeline could cut"),
        ("Fabric", lightning_smddp.strategies.lightning.SMDDPStrategy(), "(SMDDPFabricStrategy, "),
    ],
)
def test_a_name_that_is_nearly_ours(connector: str, strategy: Any, said: str) -> None:
    package = importlib.import_module("lightning")
    with pytest.raises(ValueError, match="invalid strategy name") as caught:
        getattr(package, connector)(strategy=strategy, accelerator="cpu", devices=2)
    assert said in str(caught.value)
    assert ("lightning_smddp has" in str(caught.value)) == bool(said)


def test_a_second_registration_changes_nothing() -> None:
    module = importlib.import_module("lightning.pytorch.strategies")
    before = dict(module.StrategyRegistry)
    finders = list(sys.meta_path)
    _registration.install()
    _registration.autoload()
    lightning_smddp._registration.register(module)
    assert dict(module.StrategyRegistry) == before
    assert sys.meta_path == finders


def test_the_module_looks_as_without_us() -> None:
    module = importlib.import_module("lightning.pytorch.strategies")
    assert "StrategyRegistry" in inspect.getsource(module)
    assert importlib.resources.files(module).joinpath("ddp.py").is_file()
    assert module.__spec__ is not None
    assert module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__module__ == "_frozen_importlib_external"
    assert copy.copy(module.__loader__).path == module.__file__
    assert importlib.util.find_spec(module.__name__) is module.__spec__


def test_a_lightning_that_we_do_not_know_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has other names, say; the import goes on, with a warning."""
    name = "lightning.pytorch.trainer.connectors.accelerator_connector"
    module = type(sys)(name)
    module._AcceleratorConnector = type("_AcceleratorConnector", (), {})  # type: ignore[attr-defined]
    loader = type("Loader", (), {"exec_module": lambda self, module: None})()
    _registration._change_behind(loader)
    with pytest.warns(UserWarning, match=f"could not register in {name}: AttributeError"):
        loader.exec_module(module)


def test_lightning_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finder answers as if it were not there."""
    finder = _registration._RegistryFinder()
    monkeypatch.setattr(sys, "meta_path", [finder])
    assert finder.find_spec("pytorch_lightning.strategies", []) is None


# ---- public names ----


def test_public_names() -> None:
    namespace: dict[str, Any] = {}
    exec("from lightning_smddp import *", namespace)
    assert set(lightning_smddp.__all__) <= set(namespace)
    assert set(lightning_smddp.__all__) <= set(dir(lightning_smddp))
    assert sorted(lightning_smddp.__all__) == lightning_smddp.__all__
    for name in lightning_smddp.__all__:
        assert inspect.isclass(namespace[name]) or inspect.isfunction(namespace[name])
        assert inspect.getdoc(namespace[name])
    with pytest.raises(AttributeError, match="no attribute 'SMDDPStrateggy'"):
        _ = lightning_smddp.SMDDPStrateggy
    with pytest.raises(ImportError):
        from lightning_smddp import nothing_of_this_name  # noqa: F401


def test_strategies_pickle() -> None:
    strategy = lightning_smddp.SMDDPStrategy(**grouped(algorithm="native", compression="int8", collective_timeout=5))
    copied = pickle.loads(pickle.dumps(strategy))
    assert copied._session.options == strategy._session.options
