"""Watching the ranks of a job: who failed first, stopping together, nothing left behind. Knows nothing of Lightning.

Each rank has one watching thread (``watch.py``) beside its training thread, which talks to it by ``supervisor.py``.
The watching thread of rank 0 is the hub, too, to which all others are connected as clients.

When a rank dies in the middle of training:

1. The hub sees it: the connection breaks, or, on its own host, the process ends (``Hub._ended`` in ``hub.py``). Of
   another host's process the next rank there tells the hub how it ended (``Client._neighbour_ended``). A rank that
   lives and says nothing is found by the time since its last heartbeat (``Hub.tick``); a hang by ``hangs.py``. If rank
   0 dies, each client sees that by itself (``Client._hub_ended``).
2. ``Peer.settle`` (``peer.py``) finds out how: which signal, which exit code, whether memory was short.
3. ``Hub.declare`` makes that the job's first failure (``failure.py``), and tells all; later ones are consequences.
4. On every rank ``Client.record`` (``client.py``) notes it, and ``Shutdown.after_failure`` (``shutdown.py``) begins to
   count the time: the training thread gets the error of its collective, or is interrupted in Python code; in the end
   the process is ended by force.
5. The training thread's error goes through ``Supervisor.explain``, which ``strategies/run_supervision.py`` calls around
   the whole run: what the user sees is a ``RankFailedError`` with the rank that died, its step and why, raised from the
   error of gloo or NCCL. Lightning then tears the strategy down, which closes the supervisor, and the process ends as
   by any exception.

Signals that ask for a stop are ``signals.py`` and ``stop.py``, the ends of epochs ``epochs.py``.
"""

from lightning_smddp.supervision.failure import Failure
from lightning_smddp.supervision.progress import Progress
from lightning_smddp.supervision.stop import Stop
from lightning_smddp.supervision.supervisor import Supervisor
from lightning_smddp.supervision.watch import WatchOptions

__all__ = ["Failure", "Progress", "Stop", "Supervisor", "WatchOptions"]
