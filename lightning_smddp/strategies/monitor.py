"""A callback that logs what gradient communication costs."""

from __future__ import annotations

from typing import Any


class MonitorCommunication:
    """Log what gradient communication costs, every ``log_every_n_steps``, as a callback.

    Logs ``smddp/exposed_ms`` (backward stood still, last step), ``smddp/intra_node_mib`` and
    ``smddp/inter_node_mib`` (this rank, a step on average) and ``smddp/waited_ms`` (for others, a step on average) to
    all loggers. Does nothing with other strategies.
    """

    _logged_step = 0

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Log after a batch that ended in an optimizer step."""
        session = getattr(trainer.strategy, "_session", None)
        step = trainer.global_step
        if session is None or not session.synchronizers or not trainer.log_every_n_steps:
            return
        if step == self._logged_step or step % trainer.log_every_n_steps:
            return
        self._logged_step = step
        totals = session.recorder.read()
        steps = max(totals.steps, 1)
        metrics = {
            "smddp/exposed_ms": 1e3 * session.recorder.last_exposed_s,
            "smddp/waited_ms": 1e3 * totals.waited_s / steps,
            "smddp/intra_node_mib": totals.intra_node_bytes / 2**20 / steps,
            "smddp/inter_node_mib": totals.inter_node_bytes / 2**20 / steps,
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
