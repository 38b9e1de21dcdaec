"""Attach and detach the hooks of a watch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from torchlens_perf.errors import ConfigError, HookUnavailable, guard

_DETACH_TIMEOUT_S = 2.0


class AttachedHooks:
    """Attaches hooks, and detaches all hooks in reverse order."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        """Lock held while hooks are attached, detached, or run at the end of a step, on any thread.
        """
        self.detached = False
        self._note = note
        self._contexts: list[AbstractContextManager[None]] = []

    def attach(self, name: str, hook: Callable[[], AbstractContextManager[None]]) -> None:
        """Attach a hook.

        An unavailable or failing hook is noted and left out. Raises ConfigError.
        """
        attached = False
        try:
            with guard(f"attaching {name}", passes=(HookUnavailable, ConfigError)):
                context = hook()
                context.__enter__()
                self._contexts.append(context)
                attached = True
        except HookUnavailable as unavailable:
            self._note(f"{name}: {unavailable}")
        else:
            if not attached:
                self._note(f"{name} could not be attached: see the job's log")

    def detach(self) -> None:
        """Detach all hooks. After an exception, the next call detaches the rest."""
        # Limit the wait, because a user's callback at the end of a step may wait for this thread.
        acquired = self.lock.acquire(timeout=_DETACH_TIMEOUT_S)
        try:
            self._detach_all("detaching")
        finally:
            if acquired:
                self.lock.release()

    def abandon(self) -> None:
        """Detach in a forked child, where a thread that only the parent has may hold the lock."""
        self._detach_all("detaching in a forked child")

    def _detach_all(self, place: str) -> None:
        self.detached = True
        while self._contexts:
            with guard(place):
                self._contexts[-1].__exit__(None, None, None)
            self._contexts.pop()
