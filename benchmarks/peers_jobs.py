"""Jobs of peers.py: start the processes of a tool, ask for work, and end them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers_tools import TOOLS
from tests.support.servers import free_port

REPO = Path(__file__).parents[1]
COPIED = ("__init__.py", "gpt.py", "measure.py", "peers_tools.py", "peers_worker.py")
ANSWER_TIMEOUT_S = 300
FILES_TIMEOUT_S = 60
# Processes that import torch at the same time.
AT_ONCE = 2


class ToolError(Exception):
    """A job failed. The message has the end of its output."""


class Job:
    """The processes of one tool. They wait before they import the tool."""

    def __init__(
        self, tool: str, model: str, environments: Path, folder: Path, *,
        ranks: int = 1, options: Sequence[str] = (), clock: str = "wall",
    ) -> None:  # fmt: skip
        self.tool, self.out, self._log = tool, folder / "out", folder / "log"
        self.out.mkdir(parents=True)
        self.versions: dict[str, str] = {}
        self.steps = 0
        self._mark = uuid.uuid4().hex
        self._forks = sum(int(each[6:]) for each in options if each.startswith("forks="))
        self._own: set[int] = set()
        python = environments / TOOLS[tool][1] / "bin" / "python"
        # On users' machines, pip writes bytecode.
        dropped = ("TORCHLENS", "PYTHONDONTWRITEBYTECODE")
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(dropped)},
            "PYTHONPATH": str(_copy_worker(folder / "code")),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            "PEER_CLOCK": clock,
            "PEER_MARK": self._mark,
            "PEER_PORT": str(free_port()),
            "PEER_STORE": str(folder / "store"),
        }
        self._helper = _start_helper(tool, python, self.out, environ, self._forks or ranks)
        self._ranks: list[tuple[subprocess.Popen[str], int]] = []
        for rank in range(ranks):
            if ranks > 1:
                environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            reads, writes = os.pipe()
            command = [python, "-m", "benchmarks.peers_worker", tool, model, str(self.out)]
            with self._log.open("a") as log:
                process = subprocess.Popen(
                    [*command, *options],
                    cwd=folder, env={**environ, "PEER_ANSWERS": str(writes)}, pass_fds=[writes],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                )  # fmt: skip
            os.close(writes)
            self._ranks.append((process, reads))
            self._own.add(process.pid)

    def wait_until_ready(self) -> None:
        self._ready_bytes = max(each["resident_bytes"] for each in self._answers())

    def begin(self) -> dict[str, float]:
        """Import and start the tool. Return what that takes on the slowest rank."""
        answers = self._ask("begin")
        self.versions = answers[0]["versions"]
        self._own |= {each["pid"] for each in answers}
        self.steps += 1
        return {key: max(each[key] for each in answers) for key in ("import_s", "start_s")}

    def block(self, work: str, units: int, period_ms: float = 0.0) -> float:
        """Return the ns of a unit of work on the slowest rank."""
        if work == "step":
            self.steps += units + 1
        return max(each["ns"] for each in self._ask(f"block {work} {units} {period_ms}"))

    def measure_memory(self) -> dict[str, float]:
        """Return the growth of the largest rank since before the import of the tool, and memory and
        processor time of the tool's own processes.
        """
        resident = max(each["resident_bytes"] for each in self._ask("memory"))
        helper_bytes, helper_cpu_s = self._helper_usage()
        return {
            "rank_bytes": resident - self._ready_bytes,
            "helper_bytes": helper_bytes,
            "helper_cpu_s": helper_cpu_s,
        }

    def end(self) -> dict[str, float]:
        """Stop the tool. Return the duration of the exit, and what was written."""
        begin_s = time.monotonic()
        self._tell("exit")
        for process, _ in self._ranks:
            if process.wait(ANSWER_TIMEOUT_S):
                raise ToolError(self._log.read_text(errors="replace")[-2000:])
        exit_s = time.monotonic() - begin_s
        if self._helper is not None:
            self._helper.terminate()
        deadline_s = time.monotonic() + FILES_TIMEOUT_S
        while self._processes() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        written = sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())
        return {"exit_s": exit_s, "written_bytes": written}

    def count_steps(self) -> int | None:
        """Return how many of the steps are in the results of the tool."""
        return TOOLS[self.tool][0].count_steps(self.out)

    def close(self) -> None:
        for process, reads in self._ranks:
            process.kill()
            process.wait()
            os.close(reads)
        for pid in self._processes():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        if self._helper is not None:
            self._helper.wait()

    def _ask(self, line: str) -> list[dict[str, Any]]:
        self._tell(line)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for _, reads in self._ranks:
            text = b""
            while not text.endswith(b"\n"):
                ready, _, _ = select.select([reads], [], [], ANSWER_TIMEOUT_S)
                part = os.read(reads, 65536) if ready else b""
                if not part:
                    raise ToolError(self._log.read_text(errors="replace")[-2000:])
                text += part
            found += json.loads(text)
        return found

    def _tell(self, line: str) -> None:
        for process, _ in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def _processes(self) -> list[int]:
        """Return the processes of this job, also those that a tool has started."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"PEER_MARK={self._mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def _helper_usage(self) -> tuple[int, float]:
        """Return the resident memory of the tool's own processes, and their processor time in s."""
        resident, ticks = 0, 0
        for pid in set(self._processes()) - self._own:
            with contextlib.suppress(OSError):
                resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return resident * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK")


def _copy_worker(folder: Path) -> Path:
    """Copy the worker. The environment of a tool must see nothing else of the repository."""
    (folder / "benchmarks").mkdir(parents=True)
    for name in COPIED:
        shutil.copy(REPO / "benchmarks" / name, folder / "benchmarks")
    return folder


def _start_helper(
    tool: str, python: Path, out: Path, environ: dict[str, str], ranks: int
) -> subprocess.Popen[bytes] | None:
    """Start the process that a tool needs in addition to the job: the aggregator of TraceML."""
    if tool != "TraceML":
        return None
    command = [
        str(python.parent / "traceml"), "serve", "--mode", "summary", "--logs-dir", str(out), "--run-name", "run",
        "--nnodes", "1", "--nproc-per-node", str(ranks), "--aggregator-port", environ["PEER_PORT"],
    ]  # fmt: skip
    with (out.parent / "helper").open("w") as log:
        return subprocess.Popen(command, cwd=out, env=environ, stdout=log, stderr=log)


class Failures(dict[str, str]):
    """Tools that failed, with the reason. They are left out from then on."""

    def add(self, tool: str, error: ToolError) -> None:
        self[tool] = str(error)
        print(f"{tool} failed: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def started(
    tools: Sequence[str], model: str, environments: Path, failed: Failures, **settings: Any
) -> Iterator[tuple[dict[str, Job], dict[str, dict[str, float]]]]:
    """Start the jobs of all tools. Yield them, and what each begin took.

    Torch is imported by some processes at once. The tools are imported one after the other.
    """
    jobs: dict[str, Job] = {}
    begun: dict[str, dict[str, float]] = {}
    at_once = max(1, AT_ONCE // settings.get("ranks", 1))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for first in range(0, len(tools), at_once):
                together = tools[first : first + at_once]
                for tool in together:
                    place = Path(folder, str(len(jobs)))
                    jobs[tool] = Job(tool, model, environments, place, **settings)
                for tool in together:
                    with contained(tool, jobs, failed):
                        jobs[tool].wait_until_ready()
            for tool in list(jobs):
                with contained(tool, jobs, failed):
                    begun[tool] = jobs[tool].begin()
            yield jobs, begun
        finally:
            for job in jobs.values():
                job.close()


@contextlib.contextmanager
def contained(tool: str, jobs: dict[str, Job], failed: Failures) -> Iterator[None]:
    """Leave a tool out whose job fails in the block."""
    try:
        yield
    except ToolError as error:
        failed.add(tool, error)
        jobs.pop(tool).close()
