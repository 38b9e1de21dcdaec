"""Opt-in: a signal upon which this process writes its Python stack into a file, where py-spy may not look.

Python's faulthandler does it in the signal handler itself, so that it also works in a process that is blocked, and
while another thread holds the GIL. Not on a stopped process: it takes the signal when it goes on.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.errors import HookUnavailable

if TYPE_CHECKING:
    from torchlens_perf.session import Session

SIGNAL = signal.SIGUSR2


class StackHook:
    """Registers faulthandler for SIGUSR2; refuses where somebody else listens to it."""

    name = "faulthandler"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
            raise HookUnavailable("SIGUSR2 has a handler already; stacks of a hanging rank come from py-spy alone")
        path = session.ring_path.with_suffix(".stack")
        with open(path, "wb") as file:
            faulthandler.register(SIGNAL, file=file, all_threads=False)
            session.stack_file = str(path)
            try:
                yield
            finally:
                faulthandler.unregister(SIGNAL)
                os.unlink(path)
