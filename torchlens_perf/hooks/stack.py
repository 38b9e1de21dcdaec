"""Let the sidecar read the Python stack of a rank that hangs.

The sidecar runs py-spy. If Yama (kernel.yama.ptrace_scope) forbids this by default, the training
process permits the sidecar to trace it.

With TORCHLENS_PERF_FAULTHANDLER=1 this process also writes its Python stack into a file when it
receives a signal. Python's faulthandler writes in the signal handler itself. It therefore also
works in a blocked process, and while another thread holds the GIL. A stopped process receives the
signal when it continues.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.run import ownership, tracer
from torchlens_perf.run.directory import find_sidecar_lock
from torchlens_perf.run.processes import is_signal_in_set
from torchlens_perf.run.rank_facts import encode_path
from torchlens_perf.run.ring import STACK_SIGNAL as SIGNAL
from torchlens_perf.run.sidecar_status import read_status

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session


class TracerPermissionHook:
    """Hook that permits the node's sidecar to trace this process until the watch ends.

    A sidecar that is restarted later has no permission.
    """

    name = "stacks by py-spy"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        if not tracer.must_name_tracer():
            yield
            return
        run_id, named = session.identity.run_id, False

        def permit_sidecar() -> None:
            nonlocal named
            if not named:
                pid, _, _ = read_status(str(find_sidecar_lock(run_id)))
                named = pid > 0
                if named:
                    tracer.allow_tracer(pid)

        permit_sidecar()
        with session.run_throttled(self.name, permit_sidecar):
            try:
                yield
            finally:
                if named and not session.recorder.closed:
                    tracer.allow_tracer(0)


class FaulthandlerHook:
    """Hook that registers faulthandler for SIGUSR2, unless the job handles or ignores that signal.

    The sidecar sends the signal only while the stack file exists. The file is therefore removed
    before faulthandler is unregistered, and as soon as the job installs its own handler.
    """

    name = "faulthandler"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        # Read the kernel's state, because signal.getsignal() does not return handlers of C code,
        # such as faulthandler.
        if is_signal_in_set("SigCgt", SIGNAL) or is_signal_in_set("SigIgn", SIGNAL):
            yield  # The sidecar can still use py-spy.
            return
        path = session.ring_path.with_suffix(".stack")

        def remove_file_if_handler_replaced() -> None:
            if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
                path.unlink(missing_ok=True)

        with (
            open(ownership.create_private_file(path), "wb") as file,
            session.run_throttled("faulthandler", remove_file_if_handler_replaced),
        ):
            faulthandler.register(SIGNAL, file=file, all_threads=False)
            session.facts.stack_file = encode_path(str(path))
            session.publish()
            try:
                yield
            finally:
                # In a forked child the recorder is closed and the file belongs to the parent
                # process.
                if not session.recorder.closed:
                    path.unlink(missing_ok=True)
                faulthandler.unregister(SIGNAL)
                current = signal.getsignal(SIGNAL)
                # unregister() has restored the handler from before the watch. A handler that the
                # job installed during the watch must be installed again.
                if current is not signal.SIG_DFL:
                    signal.signal(SIGNAL, current)
