from __future__ import annotations

import pytest

from tests import rank_processes


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks are forked from a process that has imported the packages: they are imported once."""
    names = {item.module.__name__ for item in session.items if item.get_closest_marker("public")}
    rank_processes.PRELOAD += sorted(names - {*rank_processes.PRELOAD})


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Instead of the suite's: threads and semaphores of these packages are theirs."""
