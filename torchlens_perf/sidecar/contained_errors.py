"""Errors in a part of a sidecar's round end that part alone; the report says that its results are missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchlens_perf.errors import RunStoreError, guard, swallowed

if TYPE_CHECKING:
    from torchlens_perf.verdicts.node_state import NodeState


class ContainedErrors:
    """Belongs to the sidecar's thread."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    @contextlib.contextmanager
    def contain(self, place: str) -> Iterator[None]:
        """Contain what is raised inside, and note it in the node's state. place: what is being done."""
        before = swallowed.by_place[place]
        try:
            with guard(place):
                yield
        except (OSError, RunStoreError) as error:  # guard() raises in tests, but a disk that fails is no mistake
            swallowed.add(place, error)
        note = f"{place} failed in the sidecar, and its results are missing: see nodes/{self._state.host}.log"
        if swallowed.by_place[place] > before and note not in self._state.notes:
            self._state.notes.append(note)
