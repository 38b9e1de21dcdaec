"""Write a table of the memory in use before torch raises an out-of-memory error.

torch calls an observer on the thread that requested memory. torch cannot remove an observer, so
each process attaches one that does nothing outside of a watch. torch's error is raised unchanged,
and user code may catch the error. cuDNN catches it and tries a smaller workspace.
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
from torchlens_perf.recorder.folder_request import find_folder_problem
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.torch_instruments import memory_history
from torchlens_perf.run import ownership
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.oom_table import AllocationSites, OutOfMemory, build_live_table

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

SCHEMA = 1
# Maximum number of files per process. The oldest files are deleted.
_MAX_FILES = 8
# Minimum pause between tables, relative to the last table's cost: a loop may catch many errors.
_MIN_IDLE_RATIO = 100
_MAX_FRAMES = 64
# Number of recent allocations and frees that torch's memory history keeps.
_HISTORY_ENTRIES = 20_000


class _ObserverRelay:
    """Link from the process's out-of-memory observer to the current watch."""

    def __init__(self) -> None:
        self.observed: Callable[[int, int, int, int], None] | None = None
        self.attached = False

    def attach_once(self) -> None:
        """Attach the observer once. CUDA must be initialized."""
        if not self.attached:
            self.attached = True
            observer = guard("the table of device memory").wrap_attribute(self, "observed")
            torch_instruments.attach_out_of_memory_observer(observer)


relay = _ObserverRelay()


class OutOfMemoryHook:
    """Hook that writes tables at out-of-memory errors and can record a memory history."""

    name = "out of memory"

    def __init__(self, *, history: bool) -> None:
        """history: True to record stacks of live blocks and the last allocations."""
        self._history = history
        # Patch of torch's function that records a memory history, while we record one.
        self._patches = ExitStack()

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        torch_private.require("torch._C._cuda_attach_out_of_memory_observer")
        torch_private.require("torch._C._cuda_memorySnapshot")

        def attach_once_cuda_runs() -> None:
            import torch

            # Attaching and recording must not initialize CUDA, which would break a later fork.
            if torch.cuda.is_initialized():
                session.step_callbacks.remove(attach_once_cuda_runs)
                backend = torch.cuda.get_allocator_backend()
                if backend != "native":
                    session.note(f"{self.name}: the allocator {backend} does not report it")
                    return
                relay.attach_once()
                self._start_history(session)

        observer = _OomTableWriter(session)
        with session.run_throttled(self.name, attach_once_cuda_runs):
            try:
                relay.observed = observer.on_out_of_memory
                attach_once_cuda_runs()
                yield
            finally:
                relay.observed = None
                self._patches.close()
                # In a forked child the recorder is closed and the history belongs to the parent
                # process.
                if session.recorder.closed:
                    memory_history.is_ours = False
                else:
                    memory_history.end_recording()
                    observer.mark_last_error_as_caught()

    def _start_history(self, session: Session) -> None:
        if not self._history:
            return
        try:
            torch_private.require("torch.cuda.memory._record_memory_history")
        except HookUnavailable as unavailable:
            session.note(f"memory history: {unavailable}")
            return
        if torch_instruments.is_recording_memory_history():
            session.note("memory history is off: the job already records a history of its own")
            return
        memory_history.start_recording(_HISTORY_ENTRIES)
        import torch

        record = torch.cuda.memory._record_memory_history

        def record_for_job(*args: Any, **kwargs: Any) -> None:
            """Leave the history to the job, which starts or stops a history itself."""
            memory_history.is_ours = False
            self._patches.close()
            record(*args, **kwargs)

        self._patches.enter_context(
            patched(torch.cuda.memory, "_record_memory_history", record_for_job)
        )


class _OomTableWriter:
    """Writer of the out-of-memory tables of one watch."""

    def __init__(self, session: Session, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._session = session
        self._run = RunDirectory(
            Path(session.config.dir).absolute() / session.identity.run_id,
            shared=session.config.is_shared,
        )
        self._now_ns = now_ns
        self._not_before_ns = 0
        self._unreported = 0  # Number of errors since the last table.
        self._files_with_table: list[Path] = []
        self._file_without_table: Path | None = None  # The newest file, if it has no table.
        self._last: OutOfMemory | None = None  # The content of the newest file.

    def on_out_of_memory(
        self, device: int, asked_bytes: int, limit_bytes: int, free_bytes: int
    ) -> None:
        """Write a file about an out-of-memory error of this device.

        The method must not raise an exception or allocate memory on the device.
        """
        import torch

        begin_ns = self._now_ns()
        step, identity = self._session.recorder.step, self._session.identity
        path = self._run.oom_table_path(identity.rank, step)
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
            "inside": [] if self._session.recorder.closed else self._session.ring.open_span_names(),
            "untold": self._unreported,
            "caught": False,
            "table": None,
            "earlier": (
                f"{path.parent.name}/{self._files_with_table[-1].name}"
                if self._files_with_table
                else None
            ),
            "took_s": 0.0,
        }
        if begin_ns < self._not_before_ns:
            self._unreported += 1
            # Do not overwrite a table that was written in the same step.
            if self._last is not None and path in self._files_with_table:
                value = {**self._last, "untold": self._unreported}
            self._write_file(path, value)
            return
        # Frames of torch and of this package are left out of stacks.
        hidden = f"{Path(torch.__file__).parent}{os.sep}", _own_package_folder()
        places = AllocationSites(find_forward_methods(), hidden)
        module, stack = places.find_site(_find_requesting_frames())
        table = build_live_table(torch_instruments.take_memory_snapshot(), device, places)
        took_s = (self._now_ns() - begin_ns) / 1e9
        value |= {
            "module": module,
            "stack": list(stack),
            "table": table,
            "earlier": None,
            "took_s": took_s,
        }
        self._write_file(path, value)
        self._unreported = 0
        end_ns = self._now_ns()
        self._not_before_ns = end_ns + _MIN_IDLE_RATIO * (end_ns - begin_ns)

    def mark_last_error_as_caught(self) -> None:
        """Mark the last error as caught if the watch ends without an exception."""
        if self._last and sys.exc_info()[0] is None and getattr(sys, "last_type", None) is None:
            path = self._run.oom_table_path(self._last["rank"], self._last["step"])
            self._write_file(path, {**self._last, "caught": True})

    def _write_file(self, path: Path, value: OutOfMemory) -> None:
        """Write a file. Remove the previous file without a table and the oldest excess file.

        Write nothing if the disk does not respond: the process must not wait for it.
        """
        problem = find_folder_problem(path.parent, shared=self._run.shared)
        if problem:
            self._session.note(f"{OutOfMemoryHook.name}: a table could not be written: {problem}")
            return
        ownership.replace_private_file(path, json.dumps(value, separators=(",", ":")))
        if self._file_without_table not in (None, path):
            self._file_without_table.unlink(missing_ok=True)
        self._file_without_table, self._last = (path if value["table"] is None else None), value
        if self._file_without_table is None and path not in self._files_with_table:
            self._files_with_table.append(path)
        if len(self._files_with_table) > _MAX_FILES:
            self._files_with_table.pop(0).unlink(missing_ok=True)


def find_forward_methods() -> dict[str, list[tuple[int, str]]]:
    """Return (first line, class name) of each module's forward() method by file, sorted by line."""
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


def _find_requesting_frames() -> list[dict[str, Any]]:
    """Return the Python frames that requested memory, innermost first, in torch's snapshot format.

    On autograd's threads the list is empty, because these threads run no Python code.
    """
    # Skip this function and its caller.
    frames = itertools.islice(traceback.walk_stack(sys._getframe(2)), _MAX_FRAMES)
    found: list[dict[str, Any]] = [
        {"filename": each.f_code.co_filename, "line": line, "name": each.f_code.co_name}
        for each, line in frames
    ]
    return [frame for frame in found if not frame["filename"].startswith(_own_package_folder())]


def _own_package_folder() -> str:
    return f"{Path(__file__).parents[1]}{os.sep}"
