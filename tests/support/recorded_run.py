"""A receiver, and a recorded run of two ranks whose ring files no sidecar has read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support import warm_python
from tests.support.otlp_receiver import MISSING, PROGRAM, Receiver
from tests.support.processes import SCRIPTS
from tests.support.servers import wait_for
from torchlens_perf.exporters import steps_traced_by_number
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place.node import node_name
from torchlens_perf.verdicts import node_state

STEPS = 12
"""Optimizer steps of a recorded run. The first is not measured, because recording begins with
it.
"""

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""Trace context in the environment of a recorded run."""


def environment(folder: Path, told: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of test processes, which write their runs into `folder`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "TORCHLENS_PERF"))
    }
    ours = {
        "TORCHLENS_PERF_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "TORCHLENS_PERF_REPORT": "text",
    }
    return {**inherited, **ours, **told}


def train(
    folder: Path,
    told: Mapping[str, str],
    steps: int = STEPS,
    script: Path = SCRIPTS / "train_two_ranks.py",
) -> RunDirectory:
    """Train two ranks under torchrun. Return the only run directory."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--logs-specs", "torchlens_perf", str(script), str(steps),
    ]  # fmt: skip
    done = warm_python.run(command, 60, env=environment(folder, told))
    assert done.returncode == 0, done.stderr
    (path,) = [path for path in folder.iterdir() if not path.is_symlink()]
    return RunDirectory(path)


def spans_of(run: RunDirectory, every: int) -> int:
    """Return the number of a run's spans.

    Spans are the records of sampled steps, a root for each step of rank 0, and one span for a run
    with a trace context.
    """
    rows = pq.read_table(run.path / "spans", columns=["rank", "step", "kind"]).to_pylist()
    # Counters are not spans.
    rows = [row for row in rows if row["kind"] not in ("thread_time", "operators")]
    ended = {(row["rank"], row["step"]) for row in rows if row["kind"] == "step"}
    sampled = steps_traced_by_number([step for _, step in ended], every)
    records = sum((row["rank"], row["step"]) in ended and row["step"] in sampled for row in rows)
    processes = [
        process for node in node_state.load_all(run) for process in node.processes.values()
    ]
    handed_over = sum(
        process.identity.rank == 0 and bool(process.identity.traceparent) for process in processes
    )
    return records + sum(rank == 0 and step in sampled for rank, step in ended) + handed_over


def wait_for_sidecar(run: RunDirectory, timeout_s: float) -> float:
    """Wait until no sidecar reads the run. Return the seconds of waiting."""
    started_s = time.monotonic()
    assert wait_for(lambda: not _sidecars(run), timeout_s), run.node_log_path(
        node_name()
    ).read_text()
    return time.monotonic() - started_s


def _sidecars(run: RunDirectory) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            # This process of the listing has ended in the meantime.
            continue
        if b"sidecar" in arguments and str(run.path).encode() in arguments:
            found.append(process.name)
    return found


class Sidecar:
    """A sidecar process that the test has started by hand and that has ended."""

    def __init__(
        self,
        run: RunDirectory,
        folder: Path,
        told: Mapping[str, str],
        timeout_s: float = 60,
        then: str = "",
    ) -> None:
        """Run the sidecar. `then` is Python code that the process runs after the sidecar has ended."""
        code = (
            "import sys, torchlens_perf.commands.cli as cli\ncode ="
            f" cli.main(sys.argv[1:])\n{then}\nsys.exit(code)"
        )
        started_s = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                *(["-c", code] if then else ["-m", "torchlens_perf"]),
                "sidecar",
                str(run.path),
            ],
            env=environment(folder, told),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        self.took_s = time.monotonic() - started_s
        self.run = run
        self.stdout, self.log, self.returncode = done.stdout, done.stderr, done.returncode

    @property
    def report(self) -> str:
        """Return the report that the sidecar wrote."""
        return self.run.report.read_text()


@pytest.fixture(scope="session")
def _one_receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    if not PROGRAM.exists():
        pytest.skip(MISSING)
    receiver = Receiver(tmp_path_factory.mktemp("receiver"))
    yield receiver
    receiver.close()


@pytest.fixture
def receiver(_one_receiver: Receiver) -> Receiver:
    """Return the receiver with everything received before discarded."""
    _one_receiver.clear()
    return _one_receiver


@pytest.fixture(scope="session")
def _recorded(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    told = {
        "TORCHLENS_PERF_SIDECAR": "0",
        "TORCHLENS_PERF_TRACE_EVERY": "1",
        "TRACEPARENT": TRACEPARENT,
    }
    return train(tmp_path_factory.mktemp("recorded"), told)


@pytest.fixture
def recorded(_recorded: RunDirectory, tmp_path: Path) -> RunDirectory:
    """Return a finished run of two ranks whose ring files are unread.

    All steps of the run are traced.
    """
    run = RunDirectory(tmp_path / "runs" / _recorded.run_id)
    shutil.copytree(_recorded.path, run.path)
    rings = run.node_rings_path(node_name())
    rings.write_text(rings.read_text().replace(str(_recorded.path), str(run.path)))
    return run


@pytest.fixture
def sidecar(recorded: RunDirectory, tmp_path: Path) -> Callable[..., Sidecar]:
    """Return a function that runs a sidecar over the recorded run with the given variables.

    A second call is a replay.
    """

    def run(timeout_s: float = 60, then: str = "", **told: str) -> Sidecar:
        return Sidecar(
            recorded, tmp_path, {"TORCHLENS_PERF_TRACE_EVERY": "1", **told}, timeout_s, then
        )

    return run
