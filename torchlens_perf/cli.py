"""The command line: run, report, capture, sidecar, doctor. Exit code 2 and one line for a user's mistake."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchlens_perf import capture_command, simulate_command
from torchlens_perf.errors import ConfigError, TorchlensPerfError
from torchlens_perf.run_directory import RunDirectory


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["run"] and arguments[1:2] != ["--help"]:
        arguments.insert(1, "--")  # what follows is the script's, also `-m module`
    options = _parser().parse_args(arguments)
    try:
        result: int = options.command(options)
        return result
    except TorchlensPerfError as error:
        print(f"torchlens-perf: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `torchlens-perf report | head`: nobody reads on. Python would complain again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchlens-perf", description="Where each training step's time goes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="run a script, recorded", description="Runs a script as python would, recorded."
    )
    run.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="a script, or -m module")
    run.set_defaults(command=_run)

    report = commands.add_parser("report", help="show a run's report, live or finished")
    report.add_argument("run_dir", type=Path, nargs="?", help="a run directory; default: the newest one here")
    report.add_argument("--json", action="store_true", help="as JSON, schema-versioned")
    report.set_defaults(command=_report)

    sidecar = commands.add_parser("sidecar", help="read, keep and export a run; replay a finished one")
    sidecar.add_argument("run_dir", type=Path)
    sidecar.add_argument("--host", default=socket.gethostname(), help="the node whose ring files are read")
    sidecar.add_argument("--lock-descriptor", type=int, help=argparse.SUPPRESS)
    sidecar.set_defaults(command=_sidecar)

    capture_command.add_command(commands)
    simulate_command.add_command(commands)

    build_tap = commands.add_parser(
        "build-tap",
        help="compile the native tap on collectives for the torch at hand",
        description="Compiles the native tap on collectives against the torch at hand, with g++, in 10 to 30 s, for "
        "images and CI: elsewhere the first run of several ranks has it built for the next one. Without it collectives "
        "are tapped from Python, at 50 us each, and the end of asynchronous ones is not recorded.",
    )
    build_tap.add_argument("--in-background", metavar="NAME", help=argparse.SUPPRESS)
    build_tap.set_defaults(command=_build_tap)

    doctor = commands.add_parser("doctor", help="what works in this environment, and what to do where it does not")
    doctor.set_defaults(command=_doctor)
    return parser


def _run(options: argparse.Namespace) -> int:
    from torchlens_perf.launch import run_script

    script = options.script[options.script[:1] == ["--"] :]
    if not script or script == ["-m"]:
        raise ConfigError("a script is needed: torchlens-perf run train.py ARGS")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise ConfigError(f"{script[0]} is not a file")
    run_script(script)
    return 0


def _report(options: argparse.Namespace) -> int:
    from torchlens_perf.report.terminal import show

    run = RunDirectory(options.run_dir or _newest_run())
    value = _build(run)
    if options.json:
        json.dump(value, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        show(value, sys.stdout, str(run.path))
    return 0


def _newest_run() -> Path:
    from torchlens_perf.config import Config
    from torchlens_perf.errors import RunStoreError

    folder = Path(os.environ.get("TORCHLENS_PERF_DIR", Config.dir))
    runs = [path for path in folder.glob("*/nodes") if path.is_dir()]
    if not runs:
        raise RunStoreError(f"no run directory in {folder}: name one, torchlens-perf report RUN_DIR")
    return max(runs, key=lambda path: path.stat().st_mtime).parent


def _build(run: RunDirectory) -> dict[str, Any]:
    from torchlens_perf import node_state
    from torchlens_perf.report.build import build
    from torchlens_perf.report.captures import captures

    return build(run.run_id, node_state.load_all(run), captures(run))


def _sidecar(options: argparse.Namespace) -> int:
    from torchlens_perf import run_directory, run_store
    from torchlens_perf.config import from_environment
    from torchlens_perf.errors import RunStoreError, guard
    from torchlens_perf.exporters.otlp_environment import exporter_from_environment
    from torchlens_perf.replay import replay
    from torchlens_perf.sidecar import Sidecar
    from torchlens_perf.sidecar_lock import SidecarLock
    from torchlens_perf.sidecar_loop import run_sidecar
    from torchlens_perf.tap_for_next_run import TapForNextRun

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run = RunDirectory(options.run_dir.absolute())
    if not run.nodes.is_dir():
        raise RunStoreError(f"{run.path} is not a run directory")
    lock = SidecarLock(run_directory.sidecar_lock(run.run_id), options.lock_descriptor)
    if not lock.acquire():
        raise RunStoreError(f"a sidecar for {run.run_id} runs on this node already")
    with guard("lowering the sidecar's priority"):
        os.nice(5)
    rings_left = any(path.exists() for path in run.registered_rings(options.host))
    if options.lock_descriptor is None and not rings_left and run_store.hosts(run):
        exporter = exporter_from_environment(os.environ)
        done = replay(run, exporter, from_environment(os.environ).get("trace_every"))
        where = "" if exporter is not None else "; no OTLP endpoint is configured, so nothing was sent"
        print(f"replayed {done.steps} steps, {done.records} records{where}")
        for note in done.notes:
            print(f"  - {note}")
        lock.remove()
        return 1 if done.notes else 0
    tap = TapForNextRun(builds=options.lock_descriptor is not None)
    again = True
    while again:
        exporter = exporter_from_environment(os.environ)
        again = run_sidecar(Sidecar(run, options.host, exporter, _write_report, tap), lock, exporter)
    with guard("building the native tap on collectives"):
        tap.finish()
    return 0


def _write_report(run: RunDirectory, asked: dict[str, Any]) -> None:
    """Writes report.txt as rank 0's terminal wants it, whole at once: rank 0 waits for the file to be there."""
    from torchlens_perf.report.terminal import render

    text = render(_build(run), str(run.path), columns=asked.get("columns", 0), color=asked.get("color", False))
    partial = run.report.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, run.report)


def _build_tap(options: argparse.Namespace) -> int:
    from torchlens_perf import tap_build, tap_for_next_run

    if options.in_background is None:
        print(tap_build.build())
    else:
        tap_for_next_run.give_way()
        print(tap_build.build_in_background(options.in_background))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from torchlens_perf.doctor import examine

    worst = 0
    for check in examine():
        print(check)
        worst = max(worst, check.severity)
    return 1 if worst > 1 else 0
