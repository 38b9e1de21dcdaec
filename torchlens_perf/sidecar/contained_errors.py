"""Contain errors of one part of a sidecar's round. The other parts of the round still run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchlens_perf.errors import RunStoreError, guard, swallowed

if TYPE_CHECKING:
    from torchlens_perf.verdicts.node_state import NodeState


class ContainedErrors:
    """Container of errors in parts of a round. Errors become notes in the node's state."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    @contextlib.contextmanager
    def contain(self, place: str) -> Iterator[None]:
        """Log and suppress exceptions, and note them in the node's state. place: the work."""
        before = swallowed.by_place[place]
        try:
            with guard(place):
                yield
        except (OSError, RunStoreError) as error:
            # guard() raises all exceptions again in tests, but disk errors are not bugs.
            swallowed.add(place, error)
        note = (
            f"{place} failed in the sidecar, and its results are missing: see"
            f" nodes/{self._state.host}.log"
        )
        if swallowed.by_place[place] > before and note not in self._state.notes:
            self._state.notes.append(note)
