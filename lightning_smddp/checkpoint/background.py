"""Saving while training goes on: one thread, one checkpoint at a time, and failures that do not wait for the end."""

from __future__ import annotations

import threading
from collections.abc import Callable

Task = Callable[[], None]


class BackgroundWriter:
    """Runs one task at a time in a thread, and what may only be done after it if it succeeded."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._busy = False  # together with `_afterwards`, changed under the lock only
        self._afterwards: list[Task] = []

    @property
    def failure(self) -> BaseException | None:
        """What the last task raised, until :meth:`raise_failure` has raised it. Cheap: may be read every step."""
        return self._failure

    def raise_failure(self) -> None:
        """Raise what the last task raised, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def submit(self, task: Task) -> None:
        """Wait for the task before, raise its failure, and start ``task``."""
        self.wait()
        self.raise_failure()
        self._busy = True
        self._thread = threading.Thread(target=self._run, args=(task,), name="checkpoint writer")
        self._thread.start()

    def afterwards(self, task: Task) -> None:
        """Run ``task`` when the running one has succeeded, now if none runs; not at all if it failed.

        For removing what the running one replaces.
        """
        # Under the lock it is either the thread that will find this task when it has ended, or nobody: then it is our
        # turn. So none is forgotten, and none runs twice.
        with self._lock:
            if self._busy:
                self._afterwards.append(task)
                return
            failed = self._failure is not None
        if not failed:
            task()

    def wait(self) -> None:
        """Block until the task in the background has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait, and raise what has not been raised yet."""
        self.wait()
        self.raise_failure()

    def _run(self, task: Task) -> None:
        try:
            task()
            while (following := self._next()) is not None:
                following()
        except BaseException as error:
            with self._lock:
                self._failure, self._busy = error, False
                self._afterwards.clear()

    def _next(self) -> Task | None:
        with self._lock:
            self._busy = bool(self._afterwards)
            if self._busy:
                return self._afterwards.pop(0)
            return None
