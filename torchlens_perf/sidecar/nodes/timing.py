"""Timeouts and intervals of the exchange between nodes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Timing:
    """Timeouts and intervals in seconds."""

    operation_s: float = 2.0
    """Timeout of the reply to a report."""
    connect_s: float = 4.0
    """Timeout of connecting to node 0, including its proof that it has the token."""
    beat_s: float = 5.0
    """Interval of the reports of a node that has nothing new to send."""
    silent_s: float = 30.0
    """Time without reports after which node 0 ends a node's call."""
    look_s: float = 0.5
    """Interval at which node 0 looks for silent nodes and checks that its address is published."""
    first_retry_s: float = 0.25
    """Delay after an error. It doubles with each further error."""
    last_retry_s: float = 10.0
    """Longest delay after an error."""
    store_after_s: float = 2.0
    """Grace period before the job's store is asked.

    A shared run directory usually answers sooner.
    """
    store_child_s: float = 60.0
    """Lifetime of a child process that polls the job's store. Afterwards it is killed."""
    store_again_s: float = 120.0
    """Delay before the next child process, after one has failed or found nothing."""
