from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of this session keep plans: not in the user's cache, and each plan measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(plans))
