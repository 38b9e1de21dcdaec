"""Attach and detach the hooks of a watch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

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
        self._contexts = ExitStack()

    def attach(self, name: str, hook: Callable[[], AbstractContextManager[None]]) -> None:
        """Attach a hook.

        An unavailable or failing hook is noted and left out. Raises ConfigError.
        """
        attached = False
        try:
            with guard(f"attaching {name}", passes=(HookUnavailable, ConfigError)):
                self._contexts.enter_context(hook())
                attached = True
        except HookUnavailable as unavailable:
            self._note(f"{name}: {unavailable}")
        else:
            if not attached:
                self._note(f"{name} could not be attached: see the job's log")

    def detach(self) -> None:
        # Limit the wait, because a user's callback at the end of a step may wait for this thread.
        acquired = self.lock.acquire(timeout=_DETACH_TIMEOUT_S)
        try:
            self.detached = True
            with guard("detaching"):
                self._contexts.close()
        finally:
            if acquired:
                self.lock.release()

    def abandon(self) -> None:
        """Detach in a forked child, where a thread that only the parent has may hold the lock."""
        self.detached = True
        with guard("detaching in a forked child"):
            self._contexts.close()
