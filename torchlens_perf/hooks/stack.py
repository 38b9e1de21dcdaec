"""Opt-in: a signal upon which this process writes its Python stack into a file, where py-spy may not look.

Python's faulthandler does it in the signal handler itself, so that it also works in a process that is blocked, and
while another thread holds the GIL. Not on a stopped process: it takes the signal when it goes on.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.errors import HookUnavailable

if TYPE_CHECKING:
    from torchlens_perf.session import Session

SIGNAL = signal.SIGUSR2


class StackHook:
    """Registers faulthandler for SIGUSR2; refuses where somebody else listens to it, or has it ignored.

    The file is there for as long as the signal may be sent: it goes when the user's own handler comes, and before ours.
    """

    name = "faulthandler"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        # The kernel's word: signal.getsignal() knows no handler in C, as faulthandler's own.
        if signal_in("SigCgt") or signal_in("SigIgn"):
            raise HookUnavailable("SIGUSR2 has a handler already; stacks of a hanging rank come from py-spy alone")
        path = session.ring_path.with_suffix(".stack")

        def look() -> None:
            if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
                path.unlink(missing_ok=True)

        with open(path, "wb") as file, session.now_and_then("faulthandler", look):
            faulthandler.register(SIGNAL, file=file, all_threads=False)
            session.stack_file = str(path)
            try:
                yield
            finally:
                if not session.recorder.closed:  # in a forked child the file is the parent's
                    path.unlink(missing_ok=True)
                faulthandler.unregister(SIGNAL)
                theirs = signal.getsignal(SIGNAL)
                if theirs is not signal.SIG_DFL:  # installed meanwhile, and just replaced by what was there before us
                    signal.signal(SIGNAL, theirs)


def signal_in(field: str, pid: int | str = "self") -> bool:
    """Whether SIGUSR2 is in this set of a process's signals: "SigCgt" are caught, "SigIgn" ignored (proc(5)).

    Raises OSError where there is no such process.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.partition(":")[2] for line in lines if line.startswith(f"{field}:"))
    return bool(int(mask, 16) >> (SIGNAL - 1) & 1)
