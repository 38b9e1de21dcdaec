"""Timeouts and intervals of the exchange between nodes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExchangeTiming:
    """Timeouts and intervals in seconds."""

    operation_s: float = 2.0
    """Timeout of the reply to a report."""
    connect_s: float = 4.0
    """Timeout for connecting to node 0, including the check of its proof."""
    beat_s: float = 5.0
    """Interval of reports while a node has nothing new to send."""
    silent_s: float = 30.0
    """Node 0 ends a node's call after this time without reports."""
    look_s: float = 0.5
    """Interval at which node 0 looks for silent nodes and checks that its address is published."""
    first_retry_s: float = 0.25
    """Delay after an error. It doubles with each further error."""
    last_retry_s: float = 10.0
    """Longest delay after an error."""
    store_after_s: float = 2.0
    """Delay before the first search in the job's store.

    A shared run directory usually answers sooner.
    """
    store_child_s: float = 60.0
    """Lifetime of a child process that polls the job's store. Afterwards it is killed."""
    store_again_s: float = 120.0
    """Delay before the next child process, after one has failed or found nothing."""
