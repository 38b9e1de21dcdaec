"""Run the check's parts in separate processes until the time limit of all parts.

Parts that measure time run alone, others side by side. A part's effects on its process or its
device context do not affect other parts, and a part that hangs or dies loses only its own lines.
The result files are written after each line, so a kill loses no line.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_check.lines import FAIL, NOT_RUN, Line
from benchmarks.gpu_check.parts import SLOWER, Part
from benchmarks.gpu_check.results import HEAD, Results, write

ROOT = Path(__file__).parent.parent.parent
FILE, DATA = "gpu-check.md", "gpu-check.json"
# More parts would fill a GPU of 80 GB.
_MOST_SIDE_BY_SIDE = 4
# Time for a part's process to end after its last line.
_ENDING_S = 5


class RunningPart:
    """A part's process, and the pipe that its lines come through."""

    def __init__(self, part: Part, device: str, limit_s: float) -> None:
        self.part, self.limit_s, self.lines = part, limit_s, 0
        self.begin_s = time.monotonic()
        self.reading, writing = os.pipe()
        command = [sys.executable, "-m", "benchmarks.gpu_check.part", part.name]
        command += ["--target", part.target, "--device", device, "--lines", str(writing)]
        self._process = subprocess.Popen(
            [*command, "--limit", f"{limit_s:.1f}"], cwd=ROOT, pass_fds=(writing,), stdin=subprocess.DEVNULL,
            stdout=sys.stderr, start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        self._rest = b""

    @property
    def deadline_s(self) -> float:
        return self.begin_s + self.limit_s

    def read_lines(self) -> list[Line] | None:
        """Return the lines that have come, or None after the part has closed its pipe."""
        read = os.read(self.reading, 1 << 16)
        if not read:
            return None
        *whole, self._rest = (self._rest + read).split(b"\n")
        self.lines += len(whole)
        return [Line(*json.loads(each)) for each in whole]

    def wait(self) -> int | None:
        """Return the exit code of a part that has closed its pipe; None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_ENDING_S)
        return None

    def end(self) -> None:
        """Kill all processes of the part's session, also those that a finished part has left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self.reading)


class Runner:
    """Runs parts, prints their lines, and writes the files."""

    def __init__(
        self,
        out: Path,
        device: str,
        facts: Mapping[str, str],
        seconds: float,
        side_by_side: int | None = None,
    ) -> None:
        """Set up the runner. `out` is the folder of the files, and `facts` describes the machine.

        After `seconds` no part starts any more, and running parts are ended. side_by_side: the
        largest number of parts that run at a time, by default one per processor, at most 4.
        """
        processors = len(os.sched_getaffinity(0))
        self._width = side_by_side or min(_MOST_SIDE_BY_SIDE, processors)
        self._out, self._device, self._seconds = out, device, seconds
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self.results = Results(date, dict(facts))
        self._end_s = time.monotonic() + seconds
        self._selector = selectors.DefaultSelector()
        self._running: list[RunningPart] = []

    def run(self, parts: Sequence[Part]) -> int:
        """Run the parts. Return 1 on a FAIL, 3 if parts were left for lack of time, else 0."""
        self.results.to_come = [part.name for part in parts]
        self._save()
        print("\n".join(HEAD), flush=True)
        waiting = list(parts)
        try:
            while waiting or self._running:
                while waiting and self._may_begin(waiting[0]):
                    self._begin(waiting.pop(0))
                self._take_lines()
        finally:
            for running in self._running:
                running.end()
        print("\n" + self.results.summary(), flush=True)
        return 1 if self.results.failed else 3 if self.results.left else 0

    def _may_begin(self, part: Part) -> bool:
        if not self._running:
            return True
        alone = part.alone or self._running[0].part.alone
        return not alone and len(self._running) < self._width

    def _begin(self, part: Part) -> None:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            self._out_of_time(part, "not begun")
            self._done(part)
            return
        running = RunningPart(part, self._device, min(self._limit_s(part), left_s))
        self._running.append(running)
        self._selector.register(running.reading, selectors.EVENT_READ, running)

    def _limit_s(self, part: Part) -> float:
        return part.limit_s * SLOWER.get(self._device, 1.0)

    def _take_lines(self) -> None:
        """Wait for lines of the running parts, and end those that have closed their pipe or are late."""
        if not self._running:
            return
        wait_s = min(running.deadline_s for running in self._running) - time.monotonic()
        for key, _ in self._selector.select(max(wait_s, 0)):
            lines = key.data.read_lines()
            for line in lines or ():
                self._add(line)
            if lines is None:
                self._finish(key.data, in_time=True)
        for running in list(self._running):
            if time.monotonic() >= running.deadline_s:
                self._finish(running, in_time=False)

    def _finish(self, running: RunningPart, *, in_time: bool) -> None:
        self._selector.unregister(running.reading)
        self._running.remove(running)
        code = running.wait() if in_time else None
        running.end()
        part = running.part
        if not in_time and running.limit_s < self._limit_s(part):
            self._out_of_time(part, "ended before its end")
        elif not in_time:
            self._fail(part, f"was ended after {running.limit_s:g} s", "ends")
        elif code is None:
            self._fail(part, f"did not end within {_ENDING_S} s of its last line", "ends")
        elif code:
            self._fail(part, f"exit code {code}", "0")
        elif not running.lines:
            self._fail(part, "no line", "a line at least")
        self.results.seconds[part.name] = time.monotonic() - running.begin_s
        self._done(part)

    def _done(self, part: Part) -> None:
        self.results.to_come.remove(part.name)
        self._save()

    def _fail(self, part: Part, value: str, bar: str) -> None:
        self._add(Line(part.name, "the part itself", value, bar, FAIL))

    def _out_of_time(self, part: Part, how: str) -> None:
        self.results.left.append(part.name)
        value = f"{how}: {self._seconds:.0f} s were over"
        self._add(Line(part.name, "the part itself", value, "", NOT_RUN))

    def _add(self, line: Line) -> None:
        self.results.lines.append(line)
        self._save()
        print(line.markdown(), flush=True)

    def _save(self) -> None:
        self.results.save(self._out / DATA)
        write(self._out / FILE, self.results.markdown())
