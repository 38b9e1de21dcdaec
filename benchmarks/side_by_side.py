"""Compare how several tools show a small job with a slow rank, and how they slow the job down.

    python -m benchmarks.side_by_side --tools PYTHON --out FOLDER     # in the environment of `make
    test-page`

--tools is the interpreter of an environment with torch, Bokeh, traceml-ai, memray, pyinstrument,
wandb and dask[distributed]. Each tool runs the job of side_by_side_training.py REPEATS times, in a
new random order in each round. --out receives the pages, a screenshot of each with and without
scripts, and the terminals as text. The tables are in docs/internals/side-by-side.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, sync_playwright

from benchmarks.measure import Table
from tests.support.processes import wait_for_sidecar
from tests.support.servers import free_port
from tests.support.tmux import Tmux
from torchlens_perf.run.directory import RunDirectory

STEPS, LIVE_STEPS, REPEATS = 600, 2400, 3
LIVE_AFTER_S, SETTLED_S, TIMEOUT_S = 34.0, 5.0, 240
TOOLS = ("none", "torchlens_perf", "traceml", "memray", "pyinstrument", "wandb", "dask")
REPO = Path(__file__).parent.parent
JOB = REPO / "benchmarks" / "side_by_side_training.py"
# The options of benchmarks/page_view.py, except that only this machine can be reached.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--host-resolver-rules=MAP * 127.0.0.1:1, EXCLUDE 127.0.0.1",
]
SAYS = re.compile(r"[^\n]*\b(?:rank|r)[ -_/]?1\b[^\n]*", re.IGNORECASE)
SETTLE_MS = 1500


def command(tool: str, python: Path, out: Path, steps: int) -> list[str]:
    """Return the command that runs the job under this tool, as its documentation shows it."""
    job = [tool, str(out), str(steps)]
    if tool == "dask":
        return [
            str(python),
            "-m",
            "benchmarks.side_by_side_dask",
            str(out),
            str(steps),
            str(dashboard_port(out)),
        ]
    if tool == "traceml":
        return [*traceml(python, out, "summary"), "--html-report", "--args", *job]
    return [
        str(python),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(JOB),
        *job,
    ]


def traceml(python: Path, out: Path, mode: str) -> list[str]:
    """Return TraceML's launcher command, up to the arguments of the job."""
    ports = ["--master-port", str(free_port()), "--aggregator-port", str(free_port())]
    where = ["--nproc-per-node", "2", "--logs-dir", str(out), "--run-name", mode]
    return [str(python.parent / "traceml"), "run", str(JOB), "--mode", mode, *where, *ports]


def dashboard_port(out: Path) -> int:
    """Return the port of Dask's dashboard, which is chosen once per folder."""
    kept = out / "port"
    if not kept.exists():
        kept.write_text(str(free_port()))
    return int(kept.read_text())


def environ(tool: str) -> dict[str, str]:
    """Return the job's environment. Our package is not loaded under another tool."""
    ours = "1" if tool == "torchlens_perf" else "0"
    return {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": ours,
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def started(tool: str, python: Path, out: Path, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job. All processes of the job have ended when the context ends."""
    out.mkdir(parents=True)
    with open(out / "log", "wb") as log:
        process = subprocess.Popen(
            command(tool, python, out, steps),
            cwd=out,
            env=environ(tool),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(tool: str, python: Path, out: Path) -> dict[str, float]:
    """Run once.

    Return the processes' resources, the loop's times, and the time from the loop's end to the
    launcher's.
    """
    with started(tool, python, out, STEPS) as process:
        code = process.wait(TIMEOUT_S)
        ended_s = time.time()
    if code:
        raise RuntimeError(
            f"{tool}: exit code {code}: {(out / 'log').read_text(errors='replace')[-1500:]}"
        )
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    found = {name: float(max(each[name] for each in ranks)) for name in ranks[0]}
    return {**found, "exit_s": ended_s - found["ended_s"]}


def pages(tool: str, python: Path, out: Path) -> list[Path]:
    """Return the pages of a finished job, which the tool's command generates if there is one."""
    if tool == "torchlens_perf":
        (found,) = (out / "runs").iterdir()
        wait_for_sidecar(RunDirectory(found))
        return [found / "report.html"]
    if tool == "memray":
        for rank in range(2):
            # --no-web makes a page that contains its own scripts and styles.
            way = ["--no-web"] if rank == 1 else []
            html = [
                "flamegraph",
                "-f",
                *way,
                "-o",
                str(out / f"rank{rank}.html"),
                str(out / f"rank{rank}.bin"),
            ]
            subprocess.run([python, "-m", "memray", *html], check=True, stdout=subprocess.DEVNULL)
    fixed = {
        "traceml": ["summary/final_summary.html"],
        "dask": ["report.html"],
        "wandb": [],
        "none": [],
    }
    return [out / each for each in fixed.get(tool, ["rank0.html", "rank1.html"])]


def looked_at(browser: Browser, url: str, picture: Path) -> dict[str, Any]:
    """Load a page with and without scripts, without a network. Return measurements of it."""
    found: dict[str, Any] = {}
    for scripts in (True, False):
        context = browser.new_context(
            viewport={"width": 1280, "height": 900}, java_script_enabled=scripts
        )
        tab, asked, problems = context.new_page(), [], []
        tab.on("request", lambda request, asked=asked: asked.append(request.url))
        tab.on("pageerror", lambda error, problems=problems: problems.append(str(error)))
        tab.goto(url, wait_until="load")
        tab.wait_for_timeout(SETTLE_MS)
        words = tab.evaluate("document.body.innerText")
        said = SAYS.search(words)
        name = "with" if scripts else "without"
        found[name] = len(words.split())
        found[f"{name}, of rank 1"] = " ".join(said[0].split())[:70] if said else ""
        tab.screenshot(path=picture.with_name(f"{picture.name}-{name}-scripts.png"))
        if scripts:
            first = (
                "performance.getEntriesByName('first-contentful-paint').map(each =>"
                " each.startTime)[0] ?? null"
            )
            found["paint_ms"] = tab.evaluate(first)
            foreign = {
                urlsplit(each).hostname
                for each in asked
                if urlsplit(each).scheme in ("http", "https", "ws")
            }
            found["hosts"] = sorted(host for host in foreign - {urlsplit(url).hostname} if host)
            found["problems"] = problems
        context.close()
    return found


def show_pages(browser: Browser, python: Path, out: Path) -> None:
    """Print a row for each page. A separate run is made for Dask's live dashboard."""
    table = Table(
        "page", "file", "first paint", "words", "without scripts", "of rank 1", "asks for", "errors"
    )

    def row(name: str, size: str, url: str) -> None:
        found = looked_at(browser, url, out / name)
        paints = [looked_at(browser, url, out / name)["paint_ms"] for _ in range(4)] + [
            found["paint_ms"]
        ]
        measured = [each for each in paints if each is not None]
        paint = f"{statistics.median(measured):.0f} ms" if measured else "never"
        said = found["with, of rank 1"] or "nothing"
        cells = (
            name,
            size,
            paint,
            found["with"],
            found["without"],
            said,
            ", ".join(found["hosts"]) or "nothing",
        )
        table.row(*cells, len(found["problems"]))

    for tool in TOOLS:
        for path in pages(tool, python, out / f"{tool}-0"):
            row(f"{tool}-{path.stem}", f"{path.stat().st_size / 1e3:.0f} kB", path.as_uri())
    live = out / "dask-live"
    with started("dask", python, live, LIVE_STEPS):
        time.sleep(LIVE_AFTER_S)
        row("dask-dashboard", "live", f"http://127.0.0.1:{dashboard_port(live)}/status")


def show_terminals(python: Path, out: Path) -> None:
    """Save terminals of 80 and 120 columns in the middle of a run.

    For wandb, save the terminal's text after the run.
    """
    leet = f"{python.parent / 'wandb'} leet {out / 'wandb-0' / 'wandb'}"
    for columns, lines in ((80, 24), (120, 40)):
        folder = out / f"terminal-{columns}"
        begun = " ".join(
            [*traceml(python, folder, "cli"), "--args", "traceml", str(folder), str(LIVE_STEPS)]
        )
        folder.mkdir()
        with Tmux(columns, lines, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) as terminal:
            terminal.type(begun, "Enter")
            time.sleep(LIVE_AFTER_S)
            _keep(terminal, out / f"traceml-{columns}.txt")
        with (
            started("torchlens_perf", python, out / f"live-{columns}", LIVE_STEPS),
            Tmux(columns, lines) as terminal,
        ):
            time.sleep(LIVE_AFTER_S - SETTLED_S)
            runs = out / f"live-{columns}" / "runs"
            terminal.type(
                f"TORCHLENS_PERF_DIR={runs} {sys.executable} -m torchlens_perf top", "Enter"
            )
            time.sleep(SETTLED_S)
            _keep(terminal, out / f"torchlens_perf-{columns}.txt")
        with Tmux(columns, lines) as terminal:
            terminal.type(leet, "Enter")
            time.sleep(SETTLED_S)
            _keep(terminal, out / f"wandb-{columns}.txt")


def _keep(terminal: Tmux, path: Path) -> None:
    path.write_text("\n".join(terminal.lines()) + "\n")


def show_costs(found: dict[str, list[dict[str, float]]]) -> None:
    """Print each tool's costs relative to the job alone in the same rounds."""
    table = Table(
        "tool",
        "threads",
        "sockets",
        "modules imported",
        "step",
        "relative to no tool",
        "loop's end to exit",
    )
    for tool, runs in found.items():
        now = {name: statistics.median(each[name] for each in runs) for name in runs[0]}
        ratios = [
            mine["step_p50_s"] / none["step_p50_s"]
            for mine, none in zip(runs, found["none"], strict=True)
        ]
        than = [f"{now[name] - statistics.median(each[name] for each in found['none']):+.0f}" for name in
                ("threads", "sockets", "modules")]  # fmt: skip
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.row(
            tool, *than, f"{1e3 * now['step_p50_s']:.1f} ms", spread, f"{now['exit_s']:.1f} s"
        )


def main(python: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    packages = ["torch", "bokeh", "traceml-ai", "memray", "pyinstrument", "wandb", "distributed"]
    versions = (
        "from importlib.metadata import version; import sys; [print(each, version(each)) for each"
        " in sys.argv[1:]]"
    )
    subprocess.run([python, "-c", versions, *packages], check=True)
    found: dict[str, list[dict[str, float]]] = {tool: [] for tool in TOOLS}
    for number in range(REPEATS):
        for tool in random.Random(number).sample(TOOLS, len(TOOLS)):
            place = out / f"{tool}-{number}"
            shutil.rmtree(place, ignore_errors=True)
            found[tool].append(run(tool, python, place))
            print(f"{tool} {number}: {found[tool][-1]}", file=sys.stderr, flush=True)
    show_costs(found)
    print()
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        show_pages(browser, python, out)
        browser.close()
    show_terminals(python, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    asked = parser.parse_args()
    main(asked.tools.absolute(), asked.out.absolute())
