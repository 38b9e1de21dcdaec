"""Compare the costs of this package with those of other tools: `make bench-peers`.

    python -m benchmarks.peers ENVIRONMENTS --generations N --rounds N --data FILE --write

ENVIRONMENTS is the folder with an environment for each tool. All tools do the same work in processes
of their own, which take turns in blocks: in each round every process makes one block, in shuffled
order. A generation starts all processes anew. The values go to FILE as JSON. --write renews the
tables of docs/internals/performance.md and the chart of the README (benchmarks/peers_tables.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import peers_tables
from benchmarks.peers_tools import TOOLS, WITHOUT_MODULES, WITHOUT_SECTIONS
from benchmarks.planted_traceml import free_port

REPO = Path(__file__).parents[1]
COPIED = ("__init__.py", "gpt.py", "measure.py", "peers_tools.py", "peers_worker.py")
ANSWER_TIMEOUT_S = 180
FILES_TIMEOUT_S = 60


@dataclasses.dataclass(frozen=True)
class Work:
    ranks: int
    units: int
    """Units of work in a block."""
    tools: tuple[str, ...] = tuple(TOOLS)


WORKS = {
    "section": Work(1, 2000, tuple(tool for tool in TOOLS if tool not in WITHOUT_SECTIONS)),
    "gpt": Work(1, 16),
    "modules": Work(1, 16, tuple(tool for tool in TOOLS if tool not in WITHOUT_MODULES)),
    "ddp": Work(2, 16),
    "all_reduce": Work(2, 100, tuple(tool for tool in TOOLS if tool not in WITHOUT_SECTIONS)),
}


class ToolError(Exception):
    """A job failed. The message has the end of its output."""


class Job:
    """The processes of one tool."""

    def __init__(self, tool: str, work: str, environments: Path, folder: Path) -> None:
        self.out, self._log = folder / "out", folder / "log"
        self.out.mkdir(parents=True)
        self._mark, self._steps = uuid.uuid4().hex, 0
        python = environments / TOOLS[tool][1] / "bin" / "python"
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TORCHLENS")},
            "PYTHONPATH": str(_copy_worker(folder / "code")),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            "PEER_MARK": self._mark,
            "PEER_PORT": str(free_port()),
            "PEER_STORE": str(folder / "store"),
        }
        self._helper = _start_helper(tool, python, self.out, environ, WORKS[work].ranks)
        self._ranks: list[tuple[subprocess.Popen[str], int]] = []
        for rank in range(WORKS[work].ranks):
            if WORKS[work].ranks > 1:
                environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
                environ |= {"LOCAL_WORLD_SIZE": "2"}
            reads, writes = os.pipe()
            with self._log.open("a") as log:
                process = subprocess.Popen(
                    [python, "-m", "benchmarks.peers_worker", tool, work, str(self.out)],
                    cwd=folder, env={**environ, "PEER_ANSWERS": str(writes)}, pass_fds=[writes],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                )  # fmt: skip
            os.close(writes)
            self._ranks.append((process, reads))

    def answers(self, word: str = "") -> list[dict[str, Any]]:
        """Send a line to all ranks, and return their answers."""
        found = []
        if word:
            self._tell(word)
        for _, reads in self._ranks:
            ready, _, _ = select.select([reads], [], [], ANSWER_TIMEOUT_S)
            text = os.read(reads, 65536) if ready else b""
            if not text:
                raise ToolError(self._log.read_text(errors="replace")[-2000:])
            found.append(json.loads(text))
        return found

    def block(self, units: int) -> float:
        """Return the ns of a unit of work on the slowest rank."""
        self._steps += units + 1
        return max(each["ns"] for each in self.answers(f"block {units}"))

    def end(self) -> dict[str, float]:
        """Stop the tool, and return memory, the duration of the exit, and what was written."""
        resident = max(each["resident_bytes"] for each in self.answers("end"))
        own = {process.pid for process, _ in self._ranks}
        helpers = sum(_resident_bytes(pid) for pid in self._processes() if pid not in own)
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
            time.sleep(0.1)
        written = sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())
        return {
            "resident_bytes": resident,
            "helper_bytes": helpers,
            "exit_s": exit_s,
            "bytes_per_step": written / self._steps,
        }

    def close(self) -> None:
        for process, reads in self._ranks:
            process.kill()
            process.wait()
            os.close(reads)
        for pid in self._processes():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)

    def _tell(self, word: str) -> None:
        for process, _ in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(word + "\n")
                process.stdin.flush()

    def _processes(self) -> list[int]:
        """Return the processes of this job, also those that a tool has started."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"PEER_MARK={self._mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


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


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@contextlib.contextmanager
def started(
    work: str, tools: list[str], environments: Path, failed: dict[str, str]
) -> Iterator[tuple[dict[str, Job], dict[str, dict[str, Any]]]]:
    """Start the jobs of all tools one after the other. Yield them with the first answer of each.

    Tools that fail are left out, and `failed` gets the reason.
    """
    jobs: dict[str, Job] = {}
    first: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for number, tool in enumerate(tools):
                job = Job(tool, work, environments, Path(folder, str(number)))
                try:
                    first[tool] = job.answers()[0]
                    jobs[tool] = job
                except ToolError as error:
                    job.close()
                    failed[tool] = str(error)
                    print(f"{tool} failed in {work}: {error}", file=sys.stderr, flush=True)
            yield jobs, first
        finally:
            for job in jobs.values():
                job.close()


def measure(
    environments: Path, works: list[str], tools: list[str], generations: int, rounds: int
) -> dict[str, Any]:
    """Return the values of all works: ns of a unit by tool, generation and round; and resources by
    tool and generation, from the GPT step.
    """
    times: dict[str, dict[str, list[list[float]]]] = {work: {} for work in works}
    resources: dict[str, dict[str, list[float]]] = {}
    versions: dict[str, str] = {}
    failed: dict[str, str] = {}
    draw = random.Random(1)
    for generation in range(generations):
        for work in works:
            asked = [tool for tool in WORKS[work].tools if tool in tools and tool not in failed]
            draw.shuffle(asked)
            with started(work, asked, environments, failed) as (jobs, first):
                order = list(jobs)
                found: dict[str, list[float]] = {tool: [] for tool in order}
                for _ in range(rounds):
                    draw.shuffle(order)
                    for tool in order:
                        found[tool].append(jobs[tool].block(WORKS[work].units))
                for tool, values in found.items():
                    times[work].setdefault(tool, []).append(values)
                    versions |= first[tool].pop("versions")
                    ended = jobs[tool].end()
                    if work == "gpt":
                        kept = resources.setdefault(tool, {})
                        for key, value in {**first[tool], **ended}.items():
                            kept.setdefault(key, []).append(value)
            print(f"generation {generation + 1}: {work}", file=sys.stderr, flush=True)
    return {
        "times_ns": times,
        "resources": resources,
        "versions": versions,
        "failed": failed,
        "rounds": rounds,
        "steps": rounds * (WORKS["gpt"].units + 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}",
        "load": os.getloadavg()[2],
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", type=Path, metavar="ENVIRONMENTS")
    parser.add_argument("--generations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if "none" not in asked.tools:
        parser.error("--tools must contain none, which the other tools are compared with")
    data = measure(
        asked.environments.absolute(), asked.works, asked.tools, asked.generations, asked.rounds
    )
    asked.data.write_text(json.dumps(data))
    print("\n".join(peers_tables.draw_tables(data)))
    if asked.write:
        peers_tables.write(data, REPO)
    return 1 if data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
