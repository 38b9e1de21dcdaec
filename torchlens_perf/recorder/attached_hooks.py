"""The hooks of a watch while they are attached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from torchlens_perf.errors import ConfigError, HookUnavailable, guard

_DETACH_TIMEOUT_S = 2.0


class AttachedHooks:
    """Attaches hooks, and detaches all of them, the last one first."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        """Held while hooks are attached, detached, or work at a step's end: each may be on another thread."""
        self.detached = False
        self._note = note
        self._contexts = ExitStack()

    def attach(self, name: str, hook: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter the context that `hook` makes. One that is unavailable or fails is noted. Raise ConfigError."""
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
        # With a limit: a callback of the user's may wait for this thread at the step's end.
        acquired = self.lock.acquire(timeout=_DETACH_TIMEOUT_S)
        try:
            self.detached = True
            with guard("detaching"):
                self._contexts.close()
        finally:
            if acquired:
                self.lock.release()

    def abandon(self) -> None:
        """Detach in a forked child, where a thread that the child lacks may hold the lock."""
        self.detached = True
        with guard("detaching in a forked child"):
            self._contexts.close()
