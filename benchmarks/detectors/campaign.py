"""Rounds of one planted run under each tool, in turns and in a random order."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.detectors.protocol import Run, read_run, times_path, write_answer
from benchmarks.detectors.tools import TOOLS, Tool
from benchmarks.detectors.traceml_launcher import run_under_launcher
from benchmarks.planted_faults import REPOSITORY, RUN_TIMEOUT_S, environment
from benchmarks.planted_truth import FAULTY, HEALTHY, Truth, plant

RANK = REPOSITORY / "benchmarks" / "detectors" / "rank.py"
ENVIRONMENTS = REPOSITORY / ".venv-peers"
# Fresh processes start after this many runs, because a run may affect later runs of its process.
RUNS_PER_GROUP = 20


def draw_truths(seed: int, ranks: int, kinds: Sequence[str] = FAULTY) -> Iterator[Truth]:
    """Yield truths without end: the kinds of faults in a random order, and a clean run after each.

    The seed determines them.
    """
    draw = random.Random(seed)
    clean = itertools.cycle(draw.sample(HEALTHY, len(HEALTHY)))
    while True:
        for kind in draw.sample(list(kinds), len(kinds)):
            yield plant(kind, draw.randrange(10**6), ranks)
            yield plant(next(clean), draw.randrange(10**6), ranks)


def python_of(tool: Tool, environments: Path) -> Path:
    return (
        environments / tool.environment / "bin" / "python"
        if tool.environment
        else Path(sys.executable)
    )


def obstacle(name: str, environments: Path) -> str:
    """Return why a tool does not run here, or ""."""
    tool = TOOLS[name]
    if tool.watch is None:
        return tool.remark
    if not python_of(tool, environments).exists():
        return f"not installed: `make .venv-peers/{tool.environment}/ready`"
    return ""


class Group:
    """The rank processes of a tool, which make one run after the other."""

    def __init__(self, name: str, environments: Path, out: Path) -> None:
        self._name, self._out = name, out
        self._tool = TOOLS[name]
        self._python = python_of(self._tool, environments)
        self._processes: list[subprocess.Popen[str]] = []
        self._made = 0
        self._environ = environment()
        if name != "torchlens_perf":
            # This setting keeps our package out of other tools' processes.
            self._environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

    def run(self, truth: Truth, folder: Path) -> None:
        """Make one run. Raises RuntimeError or TimeoutError without a result."""
        folder.mkdir(parents=True)
        run = f"{truth.kind}:{truth.seed}"
        if self._tool.summary is not None:
            summary = folder / "run" / "final_summary.json"
            failed = run_under_launcher(
                RANK,
                [self._name, run, str(folder)],
                truth.ranks,
                folder,
                self._python,
                self._environ,
            )
            if failed:
                raise RuntimeError(failed)
            write_answer(folder, self._tool.summary(summary))
            return
        if self._made % RUNS_PER_GROUP == 0:
            self._start(truth.ranks)
        self._made += 1
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{run} {folder}\n")
            process.stdin.flush()
        self._wait(folder)

    def _start(self, ranks: int) -> None:
        self.close()
        store = f"{tempfile.mkdtemp(prefix='store-', dir=self._out)}/store"
        command = [
            str(self._python),
            "-m",
            "benchmarks.detectors.rank",
            self._name,
            "--store",
            store,
        ]
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            with open(self._out / f"rank{rank}.log", "ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=REPOSITORY,
                        env={**self._environ, **place},
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        text=True,
                    )
                )

    def _wait(self, folder: Path) -> None:
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        while not all(times_path(folder, rank).exists() for rank in range(len(self._processes))):
            codes = [process.poll() for process in self._processes]
            if any(code is not None for code in codes):
                raise RuntimeError(f"exit codes {codes}, see {self._out}/rank*.log")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no result after {RUN_TIMEOUT_S} s")
            time.sleep(0.1)

    def close(self) -> None:
        """End the processes. The next run starts new ones."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self._processes, self._made = [], 0


@contextlib.contextmanager
def other_programs(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep this many CPUs busy, by the processes returned. They end with this process, too."""
    busy = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
    programs = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(count)]
    try:
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run_campaign(
    names: Sequence[str],
    truths: Iterable[Truth],
    minutes: float,
    out: Path,
    environments: Path,
    busy: int = 0,
) -> dict[str, int]:
    """Make rounds as long as another one fits. Return the number of failed runs by tool.

    busy: number of programs that keep a CPU busy all the time.
    """
    draw, failed = random.Random(1), dict.fromkeys(names, 0)
    begin_s, longest_s = time.monotonic(), 0.0
    with contextlib.ExitStack() as stack:
        stack.enter_context(other_programs(busy))
        groups = {name: Group(name, environments, out) for name in names}
        for group in groups.values():
            stack.callback(group.close)
        for index, truth in enumerate(truths):
            round_s = time.monotonic()
            if round_s + longest_s - begin_s > 60 * minutes:
                break
            for name in draw.sample(list(names), len(names)):
                folder = out / f"{index:03d}-{truth.name}" / name
                try:
                    groups[name].run(truth, folder)
                except (RuntimeError, TimeoutError, OSError) as error:
                    print(f"{truth.name} under {name} failed: {error}", file=sys.stderr)
                    failed[name] += 1
                    groups[name].close()
            longest_s = max(longest_s, time.monotonic() - round_s)
            print(f"{truth.name}  {time.monotonic() - round_s:.0f} s", flush=True)
    return failed


def read_runs(out: Path, name: str) -> list[Run]:
    """Return the complete runs of one tool."""
    runs = []
    for folder in sorted(out.glob(f"*/{name}")):
        with contextlib.suppress(FileNotFoundError):
            runs.append(read_run(folder))
    return runs
