"""The Python stack of a rank that hangs: what this process does so that its sidecar can read it.

The sidecar runs py-spy, and where Yama would refuse that, this process names the sidecar as its reader.
With TORCHLENS_PERF_FAULTHANDLER=1 this process writes its Python stack into a file upon a signal. Python's
faulthandler does it in the signal handler itself, so that it also works in a process that is blocked, and while another
thread holds the GIL. Not on a stopped process: it takes the signal when it goes on.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.run import ownership, tracer
from torchlens_perf.run.directory import find_sidecar_lock
from torchlens_perf.run.processes import is_in
from torchlens_perf.run.ring import STACK_SIGNAL as SIGNAL
from torchlens_perf.run.sidecar_status import read_status

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session


class ReaderHook:
    """Names the node's sidecar as the process that may read this one, once it is known, and takes that back at the end.

    A sidecar that is started again later is not named.
    """

    name = "stacks by py-spy"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        if not tracer.is_needed():
            yield
            return
        run_id, named = session.identity.run_id, False

        def name_sidecar() -> None:
            nonlocal named
            if not named:
                pid, _, _ = read_status(str(find_sidecar_lock(run_id)))
                named = pid > 0
                if named:
                    tracer.name_tracer(pid)

        name_sidecar()
        with session.throttled(self.name, name_sidecar):
            try:
                yield
            finally:
                if named and not session.recorder.closed:
                    tracer.name_tracer(0)


class StackHook:
    """Registers faulthandler for SIGUSR2, unless the job handles or ignores that signal.

    The file is there for as long as the signal may be sent: it goes when the user's own handler comes, and before ours.
    """

    name = "faulthandler"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        # The kernel's word: signal.getsignal() knows no handler in C, as faulthandler's own.
        if is_in("SigCgt", SIGNAL) or is_in("SigIgn", SIGNAL):
            yield  # stacks come from py-spy alone
            return
        path = session.ring_path.with_suffix(".stack")

        def remove_if_replaced() -> None:
            if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
                path.unlink(missing_ok=True)

        with open(ownership.create(path), "wb") as file, session.throttled("faulthandler", remove_if_replaced):
            faulthandler.register(SIGNAL, file=file, all_threads=False)
            session.publish(stack_file=str(path))
            try:
                yield
            finally:
                if not session.recorder.closed:  # in a forked child the file is the parent's
                    path.unlink(missing_ok=True)
                faulthandler.unregister(SIGNAL)
                theirs = signal.getsignal(SIGNAL)
                if theirs is not signal.SIG_DFL:  # installed meanwhile, and just replaced by what was there before us
                    signal.signal(SIGNAL, theirs)
