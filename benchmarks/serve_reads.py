"""Cost of viewers of the live page: file system calls and processor time by number of viewers, and
a long list.

    python -m benchmarks.serve_reads

The run continues during the measurement, and its state is written every four seconds, as by a
sidecar. A library that is loaded into the server and its readers counts the calls.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.measure import Table
from tests.support.failing_calls import library
from tests.support.live_simulation import LiveSimulation
from tests.support.page_server import PageServer, Viewer
from torchlens_perf.serve.follow import LOOK_INTERVAL_S

VIEWERS, RANKS, SECONDS, STATE_EVERY_S = (0, 1, 20), 8, 30.0, 4.0
RUNS = 10_000
# Limit for the first page of the list.
LISTED_S = 2.0
_POLL_INTERVAL_S = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Print the tables. Return the number of missed bars."""
    with tempfile.TemporaryDirectory() as folder:
        missed = _followed(Path(folder) / "runs", Path(folder) / "calls")
    print()
    with tempfile.TemporaryDirectory() as folder:
        return missed + _listed(Path(folder))


def _followed(folder: Path, log: Path) -> int:
    """Simulate viewers that poll once a second and load each newer page."""
    columns = (
        "viewers",
        "looks/s",
        "states read/s",
        "calls on the run directory/s",
        "time of one processor",
        "bar",
    )
    table = Table(*columns)
    with LiveSimulation(folder / "live", RANKS) as live:
        live.add_blocks(8)
        live.sidecar.save_records()
        environment = {
            "LD_PRELOAD": str(library()),
            "FAILING_PATHS": str(folder),
            "FAILING_LOG": str(log),
        }
        with PageServer(folder, **environment) as server:
            for viewers in VIEWERS:
                looks, readings, calls, cpu = _with_viewers(server, live, viewers, log)
                met = (
                    calls == 0
                    if viewers == 0
                    else looks <= 1.1 / LOOK_INTERVAL_S and readings <= 1.1 / STATE_EVERY_S
                )
                bar = "none" if viewers == 0 else "one look a second, each state once"
                row = (viewers, f"{looks:.2f}", f"{readings:.2f}", f"{calls:.1f}", f"{cpu:.1%}")
                table.row(*row, f"{bar}: {table.bar(met)}")
    return table.missed


def _with_viewers(
    server: PageServer, live: LiveSimulation, count: int, log: Path
) -> tuple[float, float, float, float]:
    """Return polls, reads and calls per second, and the used share of one processor."""
    viewer = server.viewer()
    loading = [
        threading.Thread(target=_load, args=(viewer, live.name), daemon=True) for _ in range(count)
    ]
    for thread in loading:
        thread.start()
    if count:
        viewer.poll_changes(live.name).next()
    before, calls, cpu_s = _counts(viewer, live), _lines(log), _cpu_s(server)
    began_s = time.monotonic()
    while time.monotonic() - began_s < SECONDS:
        live.add_blocks()
        time.sleep(STATE_EVERY_S)
    after, took_s = _counts(viewer, live), time.monotonic() - began_s
    calls, cpu_s = _lines(log) - calls, _cpu_s(server) - cpu_s
    return (
        (after["looks"] - before["looks"]) / took_s,
        (after["readings"] - before["readings"]) / took_s,
        calls / took_s,
        cpu_s / took_s,
    )


def _counts(viewer: Viewer, live: LiveSimulation) -> dict[str, int]:
    counts: dict[str, int] = viewer.json("/api/counts")["runs"].get(
        live.name, {"looks": 0, "readings": 0}
    )
    return counts


def _load(viewer: Viewer, run: str) -> None:
    version = ""
    # Viewers load pages until the server ends and a request raises.
    with contextlib.suppress(Exception):
        while True:
            newest = viewer.json(f"/runs/{run}/api/news")["version"]
            if newest != version:
                version = newest
                viewer.page(run)
            time.sleep(_POLL_INTERVAL_S)


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _cpu_s(server: PageServer) -> float:
    """Return the processor seconds of the server and its readers so far, including ended ones."""
    ticks = 0
    for pid, fields in [
        (server.process.pid, slice(11, 15)),
        *((each, slice(11, 13)) for each in server.children()),
    ]:
        with contextlib.suppress(OSError):
            ticks += sum(
                map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[fields])
            )
    return ticks / _TICKS


def _listed(folder: Path) -> int:
    """Time the list of a folder with very many runs."""
    with LiveSimulation(folder / "one", RANKS) as live:
        live.add_blocks(2)
    (state,) = (folder / "one" / "nodes").glob("*.json")
    for number in range(RUNS):
        nodes = folder / "runs" / f"run-{number:05d}" / "nodes"
        nodes.mkdir(parents=True)
        os.link(state, nodes / state.name)
    table = Table(f"{RUNS} runs", "seconds", "bar")
    began_s = time.monotonic()
    with PageServer(folder / "runs") as server:
        table.row("until the server listens", f"{time.monotonic() - began_s:.2f}", "")
        viewer = server.viewer()
        for what, path in (
            ("first page of the list", "/"),
            ("again", "/"),
            ("last page", f"/?page={RUNS // 50 - 1}"),
        ):
            began_s = time.monotonic()
            assert viewer.ask(path).status == 200
            took_s = time.monotonic() - began_s
            table.row(
                what, f"{took_s:.2f}", f"below {LISTED_S:g} s: {table.bar(took_s < LISTED_S)}"
            )
    return table.missed


if __name__ == "__main__":
    sys.exit(main())
