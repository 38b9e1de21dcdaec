"""Run the check's parts in separate processes, one after the other, until the time limit of all
parts.

A part's effects on its process or its device context do not affect the next part. The Markdown file
is written after each line, so a kill loses no line.
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

from benchmarks.gpu_check.lines import COLUMNS, FAIL, NOT_RUN, Line
from benchmarks.gpu_check.parts import Part

ROOT = Path(__file__).parent.parent.parent
FILE = "gpu-check.md"
_DYING_S = 15


class Runner:
    """Runs parts, prints their lines, and writes the file."""

    def __init__(self, out: Path, device: str, facts: Mapping[str, str], seconds: float) -> None:
        """Set up the runner. `out` is the folder of the file, and `facts` describes the machine.

        After `seconds` no part starts any more, and the running part is ended.
        """
        self._file, self._device, self._facts, self._date = (
            out / FILE,
            device,
            facts,
            time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        )
        self._seconds = seconds
        self._begin_s = time.monotonic()
        self._took: list[tuple[str, float]] = []
        # The list includes the running part, because the file of a killed run must name that part.
        self._to_come: list[str] = []
        self.lines: list[Line] = []
        self.left: list[str] = []
        """Parts that were not completed because the time was over."""

    @property
    def failed(self) -> int:
        """Number of missed bars."""
        return sum(line.result == FAIL for line in self.lines)

    def run(self, parts: Sequence[Part]) -> int:
        """Run the parts. Return 1 on a FAIL, 3 if parts were left for lack of time, else 0."""
        self._to_come = [part.name for part in parts]
        self._save()
        print("\n".join(_HEAD), flush=True)
        for part in parts:
            begin_s = time.monotonic()
            left_s = self._begin_s + self._seconds - begin_s
            if left_s <= 0:
                del self._to_come[0]
                self._out_of_time(part, "not begun")
                continue
            self._run_part(part, left_s)
            del self._to_come[0]
            self._took.append((part.name, time.monotonic() - begin_s))
            print(f"{part.name}: {self._took[-1][1]:.0f} s", file=sys.stderr, flush=True)
            self._save()
        self._save()
        print("\n" + self._summary(), flush=True)
        return 1 if self.failed else 3 if self.left else 0

    def _run_part(self, part: Part, left_s: float) -> None:
        reading, writing = os.pipe()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu_check.part",
            part.name,
            "--target",
            part.target,
        ]
        command += ["--device", self._device, "--lines", str(writing)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, pass_fds=(writing,), stdin=subprocess.DEVNULL,
            stdout=sys.stderr, start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        before, code = len(self.lines), None
        try:
            ended = self._take_lines(reading, time.monotonic() + min(part.limit_s, left_s))
            if ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_DYING_S)
        finally:
            _end(process)
            os.close(reading)
        if not ended and left_s < part.limit_s:
            self._out_of_time(part, "ended in its midst")
        elif not ended:
            self._itself(part, f"was ended after {part.limit_s:g} s", "ends")
        elif code is None:
            self._itself(part, f"did not end within {_DYING_S} s of its last line", "ends")
        elif code:
            self._itself(part, f"exit code {code}", "0")
        elif len(self.lines) == before:
            self._itself(part, "said nothing", "a line at least")

    def _itself(self, part: Part, value: str, bar: str) -> None:
        self._add(Line(part.name, "the part itself", value, bar, FAIL))

    def _take_lines(self, reading: int, deadline_s: float) -> bool:
        """Read lines until the part closes its end of the pipe. Return True if the pipe was closed
        in time."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            while (left_s := deadline_s - time.monotonic()) > 0:
                if not selector.select(left_s):
                    continue
                read = os.read(reading, 1 << 16)
                if not read:
                    return True
                *whole, rest = (rest + read).split(b"\n")
                for each in whole:
                    self._add(Line(*json.loads(each)))
        return False

    def _out_of_time(self, part: Part, how: str) -> None:
        self.left.append(part.name)
        self._add(
            Line(part.name, "the part itself", f"{how}: {self._seconds:g} s were over", "", NOT_RUN)
        )

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        self._save()
        print(line.markdown(), flush=True)

    def _save(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(self._text())
        partial.rename(self._file)

    def _text(self) -> str:
        found = [
            f"- {name}: {value}" for name, value in {"date": self._date, **self._facts}.items()
        ]
        took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self._took)
        rows = [line.markdown() for line in self.lines]
        head = ["# What `make gpu-check` found", "", *found, "", self._summary(), ""]
        return "\n".join(
            [*head, *_HEAD, *rows, "", f"Seconds of each part: {took or 'none has ended'}.", ""]
        )

    def _summary(self) -> str:
        bars = sum(bool(line.bar) for line in self.lines)
        words = f"{self.failed} FAIL of {bars} lines with a bar"
        missing = sum(line.result == NOT_RUN for line in self.lines)
        if missing:
            words += f"; {missing} not run"
        if self.left:
            words += f"; left for lack of time: {', '.join(self.left)}"
        if self._to_come:
            words += f"; not ended: {', '.join(self._to_come)}"
        return words + "."


_HEAD = (f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a part's session, also those that a finished part has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
