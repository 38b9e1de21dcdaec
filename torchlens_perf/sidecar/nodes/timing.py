"""How long the exchange between nodes waits, in seconds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Timing:
    """All in seconds."""

    operation_s: float = 2.0
    """Deadline of a report's reply."""
    connect_s: float = 4.0
    """Deadline of a connection to node 0, including its proof that it has the token."""
    beat_s: float = 5.0
    """Between two reports of a node that has nothing new to send."""
    silent_s: float = 30.0
    """Silence of a node after which node 0 ends its call."""
    look_s: float = 0.5
    """Between node 0's checks that its address is published, and of silent nodes."""
    first_retry_s: float = 0.25
    """After an error; doubled after each further one."""
    last_retry_s: float = 10.0
    store_after_s: float = 2.0
    """Of looking for node 0, before the job's store is asked: where the nodes share the run directory, it need not."""
    store_child_s: float = 60.0
    """Lifetime of a process that asks the job's store: it looks again and again over one connection, and is killed."""
    store_again_s: float = 120.0
    """After such a process has found nothing, or could not connect."""
