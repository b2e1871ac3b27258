"""Watching the ranks of a job: who failed first, stopping together, nothing left behind. Knows nothing of Lightning.

Torch's key-value store is what ranks talk by. Each rank has two daemon threads beside its training thread: one asks the
store twice a second, the other looks at processes of this host and ends this one if need be, and never waits for
the store, whose server may be stopped.

When a rank dies in the middle of training:

1. A rank of its host sees it in /proc (``Supervisor._look_around``, by ``Process.look``), and declares it; its other
   thread writes that into the store by ``compare_set``: the first failure counts. If the rank that died serves the
   store, everyone sees by himself that it does not answer.
2. All ranks read it within half a second. ``Shutdown.due`` begins to count the time: the training thread gets
   the error of its collective, or looks for a failure at its next batch; in the end the process is ended by force.
3. The training thread's error goes through ``Supervisor.explain``, which ``strategies/run_supervision.py`` calls around
   the whole run (entered by ``strategies/launchers.py``): what the user sees is a ``RankFailedError`` with the rank
   that died, its step and why.

Where a collective fails and no process of this host has ended, ``Supervisor._judge`` finds out who is silent or behind.
"""
