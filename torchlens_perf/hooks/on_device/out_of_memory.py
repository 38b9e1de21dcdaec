"""What held the device's memory when it ran out: a table in the run directory, written before the error is raised.

torch calls an observer then, on the thread that asked for memory. It cannot be taken away again, so one is attached in
the life of a process, and does nothing while no watch is entered. The error itself is torch's, and passes as without
us: it may end the process, be caught by the user, or by cuDNN, which tries something smaller.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import HookUnavailable, guard
from torchlens_perf.recorder import torch_instruments, torch_private
from torchlens_perf.recorder.folder_request import problem_with
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.torch_instruments import memory_history
from torchlens_perf.run import ownership
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.oom_table import OutOfMemory, Places, live_table

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

SCHEMA = 1
_MAX_FILES = 8  # of one process: the newest stay
_MAX_SHARE = 100  # where errors are caught again and again: tables take at most one part in so many of the time
_MAX_OWN_FRAMES = 64
_HISTORY_ENTRIES = 20_000  # the last allocations and frees, besides the stacks of live blocks


class _Relay:
    """What the observer of this process calls."""

    def __init__(self) -> None:
        self.observed: Callable[[int, int, int, int], None] | None = None
        self.attached = False

    def attach(self) -> None:
        """Attaches the observer, once. CUDA must be initialized."""
        if not self.attached:
            self.attached = True
            observer = guard("the table of device memory").calling(self, "observed")
            torch_instruments.attach_out_of_memory_observer(observer)


relay = _Relay()


class OutOfMemoryHook:
    """Listens for out-of-memory errors; records where memory was allocated, if asked to."""

    name = "out of memory"

    def __init__(self, *, history: bool) -> None:
        """history: keep the stacks of the live blocks, and the last _HISTORY_ENTRIES allocations and frees."""
        self._history = history
        self._watched = ExitStack()  # torch's function that records a history, while ours is recorded

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        torch_private.require("torch._C._cuda_attach_out_of_memory_observer")
        torch_private.require("torch._C._cuda_memorySnapshot")

        def start() -> None:
            import torch

            if torch.cuda.is_initialized():  # neither of the two may initialize it: that would poison a later fork
                session.step_callbacks.remove(start)
                backend = torch.cuda.get_allocator_backend()
                if backend != "native":
                    session.note(f"{self.name}: the allocator {backend} does not report it")
                    return
                relay.attach()
                self._start_history(session)

        observer = _Observer(session)
        with session.each_step(self.name, start):
            try:
                relay.observed = observer.observed
                start()
                yield
            finally:
                relay.observed = None
                self._watched.close()
                if session.recorder.closed:  # in a forked child it is the parent's
                    memory_history.release()
                else:
                    memory_history.end()
                    observer.close()

    def _start_history(self, session: Session) -> None:
        if not self._history:
            return
        try:
            torch_private.require("torch.cuda.memory._record_memory_history")
        except HookUnavailable as unavailable:
            session.note(f"memory history: {unavailable}")
            return
        if torch_instruments.records_memory_history():
            session.note("memory history is off: the job records a history of its own, which is left as it is")
            return
        memory_history.start(_HISTORY_ENTRIES)
        import torch

        record = torch.cuda.memory._record_memory_history

        def records(*args: Any, **kwargs: Any) -> None:
            """The job begins one of its own, or ends it: from then on it is not ours to end."""
            memory_history.release()
            self._watched.close()
            record(*args, **kwargs)

        self._watched.enter_context(patched(torch.cuda.memory, "_record_memory_history", records))


class _Observer:
    """Writes the tables of one watch."""

    def __init__(self, session: Session, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._session = session
        self._run = RunDirectory(
            Path(session.config.dir).absolute() / session.identity.run_id, shared=session.config.is_shared
        )
        self._now_ns = now_ns
        self._not_before_ns = 0
        self._unreported = 0  # errors since the last table
        self._files: list[Path] = []  # with tables
        self._brief: Path | None = None  # the newest, if it is one without
        self._last: OutOfMemory | None = None  # as it was written

    def observed(self, device: int, asked_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Memory has run out on this device. Must not raise, and must not allocate there."""
        import torch

        begin_ns = self._now_ns()
        step, identity = self._session.recorder.step, self._session.identity
        path = self._run.oom_table(identity.rank, step)
        value: OutOfMemory = {
            "schema": SCHEMA,
            "process": identity.key,
            "rank": identity.rank,
            "host": identity.host,
            "step": step,
            "time_unix_ns": time.time_ns(),
            "device": device,
            "device_bytes": int(torch.cuda.get_device_properties(device).total_memory),
            "asked_bytes": asked_bytes,
            "limit_bytes": limit_bytes,
            "free_bytes": free_bytes,
            "module": "",
            "stack": [],
            "inside": [] if self._session.recorder.closed else self._session.ring.inside(),
            "untold": self._unreported,
            "caught": False,
            "table": None,
            "earlier": f"{path.parent.name}/{self._files[-1].name}" if self._files else None,
            "took_s": 0.0,
        }
        if begin_ns < self._not_before_ns:
            self._unreported += 1
            if self._last is not None and path in self._files:  # the table of this step stays
                value = {**self._last, "untold": self._unreported}
            self._write(path, value)
            return
        places = Places(forward_methods(), _hidden())
        module, stack = places.of(_own_frames())
        table = live_table(torch_instruments.memory_snapshot(), device, places)
        took_s = (self._now_ns() - begin_ns) / 1e9
        value |= {"module": module, "stack": list(stack), "table": table, "earlier": None, "took_s": took_s}
        self._write(path, value)
        self._unreported = 0
        end_ns = self._now_ns()
        self._not_before_ns = end_ns + _MAX_SHARE * (end_ns - begin_ns)

    def close(self) -> None:
        """The watch ends. Where no error ends it, the job has caught the last one."""
        if self._last and sys.exc_info()[0] is None and getattr(sys, "last_type", None) is None:
            path = self._run.oom_table(self._last["rank"], self._last["step"])
            self._write(path, {**self._last, "caught": True})

    def _write(self, path: Path, value: OutOfMemory) -> None:
        """Writes it, and lets go of the oldest table, and of the last file without one.

        Not where the disk does not answer: neither the error nor the process's end may wait for that.
        """
        problem = problem_with(path.parent, shared=self._run.shared)
        if problem:
            self._session.note(f"{OutOfMemoryHook.name}: a table could not be written: {problem}")
            return
        partial = path.with_suffix(".partial")
        ownership.write(partial, json.dumps(value, separators=(",", ":")))
        os.replace(partial, path)
        if self._brief not in (None, path):
            self._brief.unlink(missing_ok=True)
        self._brief, self._last = (path if value["table"] is None else None), value
        if self._brief is None and path not in self._files:
            self._files.append(path)
        if len(self._files) > _MAX_FILES:
            self._files.pop(0).unlink(missing_ok=True)


def forward_methods() -> dict[str, list[tuple[int, str]]]:
    """Where forward() of each class of modules in this process begins: by file, first line and class, by lines."""
    from torch import nn

    found: dict[str, list[tuple[int, str]]] = {}
    classes: dict[type[nn.Module], None] = {}
    new: list[type[nn.Module]] = [nn.Module]
    while new:
        classes.update(dict.fromkeys(new))
        new = [each for kind in new for each in kind.__subclasses__() if each not in classes]
    for kind in classes:
        forward = vars(kind).get("forward")
        if isinstance(forward, types.FunctionType):
            code = inspect.unwrap(forward).__code__
            found.setdefault(code.co_filename, []).append((code.co_firstlineno, kind.__name__))
    for methods in found.values():
        methods.sort()
    return found


def _own_frames() -> list[dict[str, Any]]:
    """The Python stack that asked for memory, innermost first, as a snapshot has it; empty on autograd's threads."""
    frames = itertools.islice(traceback.walk_stack(sys._getframe(2)), _MAX_OWN_FRAMES)  # without our caller
    found: list[dict[str, Any]] = [
        {"filename": each.f_code.co_filename, "line": line, "name": each.f_code.co_name} for each, line in frames
    ]
    return [frame for frame in found if not frame["filename"].startswith(_ours())]


def _hidden() -> tuple[str, ...]:
    """Packages whose frames say nothing to the user: torch, and us."""
    import torch

    return f"{Path(torch.__file__).parent}{os.sep}", _ours()


def _ours() -> str:
    return f"{Path(__file__).parents[2]}{os.sep}"
