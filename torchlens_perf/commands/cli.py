"""The command line: run, report, capture, sidecar, doctor. Exit code 2 and one line for a user's mistake."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torchlens_perf.commands import capture, deploy_files, results, serve, simulate, top
from torchlens_perf.commands import run as run_command
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import TorchlensPerfError, printable
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.without_pandas import hide_pandas

_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; with Ctrl-C that is 130, as a shell has it.

    arguments: of a call inside another program. By default the process is the command, and its own are taken.
    """
    is_program = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["run"] and arguments[1:2] not in (["-h"], ["--help"]):
            run_command.run(arguments[1:])  # what follows is Python's command line, no part of it is ours
        options = _parser().parse_args(arguments)
        if is_program and options.command is not _doctor:  # torch imports no Dynamo where pandas is hidden
            hide_pandas()
        result: int = options.command(options)
        return result
    except TorchlensPerfError as error:
        print(f"torchlens-perf: {printable(str(error))}", file=sys.stderr)
        return 2
    except MemoryError:
        print("torchlens-perf: there is not enough memory for what its files hold", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torchlens-perf: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # `torchlens-perf report | head`: nobody reads on. Python would complain again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """Its subparsers are of the same class."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torchlens-perf", description="Where each training step's time goes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run_command.describe(commands)

    report = commands.add_parser("report", help="show a run's report, live or finished")
    report.add_argument("run_dir", type=Path, nargs="?", help="a run directory; default: the newest one here")
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, schema-versioned")
    form.add_argument("--html", type=Path, metavar="FILE", help="as a page: one HTML file that needs no network")
    form.add_argument("--schema", action="store_true", help="the JSON schema of --json; needs no run")
    report.set_defaults(command=_report)

    sidecar = commands.add_parser("sidecar", help="read, keep and export a run; replay a finished one")
    sidecar.add_argument("run_dir", type=Path)
    sidecar.add_argument(
        "--host",
        default=None,
        help="the node whose ring files are read: its name, as in nodes/NAME.json, or its host's; default: this one",
    )
    sidecar.set_defaults(command=_sidecar)

    capture.add_command(commands)
    serve.add_command(commands)
    simulate.add_command(commands)
    results.add_command(commands)
    top.add_command(commands)
    deploy_files.add_command(commands)

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
    for command in commands.choices.values():
        command.add_argument("--quiet", action="store_true", help="only what was asked for, and errors")
    return parser


def _report(options: argparse.Namespace) -> int:
    from torchlens_perf.report import report_json

    if options.schema:
        report_json.write(report_json.schema(), sys.stdout)
        return 0
    from torchlens_perf.report.run_report import run_report
    from torchlens_perf.report.terminal import show

    run = RunDirectory(options.run_dir or _newest_run())
    if options.html is not None:
        from torchlens_perf.page.document.write import write_page

        with Progress("writing the page", quiet=options.quiet):
            size = write_page(run, options.html)
        if not options.quiet:
            print(f"torchlens-perf: wrote {printable(str(options.html))}, {size / 1e6:.2f} MB", file=sys.stderr)
        return 0
    with Progress("reading the run", quiet=options.quiet) as progress:
        value = run_report(run, progress)
    if options.json:
        report_json.write(value, sys.stdout)
    else:
        show(value, sys.stdout, str(run.path))
    return 0


def _newest_run() -> Path:
    from torchlens_perf.config import Config
    from torchlens_perf.errors import RunStoreError

    folder = Path(os.environ.get("TORCHLENS_PERF_DIR", Config.dir))
    runs = [path for path in folder.glob("*/nodes") if path.is_dir() and not path.parent.is_symlink()]
    if not runs:
        raise RunStoreError(f"no run directory in {folder}: name one, torchlens-perf report RUN_DIR")
    return max(runs, key=lambda path: path.stat().st_mtime).parent


def _sidecar(options: argparse.Namespace) -> int:
    from torchlens_perf.sidecar.start.process import by_hand

    replaying = Progress("replaying the run", quiet=options.quiet)
    return by_hand(options.run_dir.absolute(), options.host, replaying, quiet=options.quiet)


def _build_tap(options: argparse.Namespace) -> int:
    from torchlens_perf.commands import tap_build
    from torchlens_perf.sidecar import tap_for_next_run

    if options.in_background is None:
        with Progress("compiling the native tap on collectives", quiet=options.quiet):
            built = tap_build.build()
        if not options.quiet:
            print(printable(str(built)))
    else:
        tap_for_next_run.give_way()
        print(printable(str(tap_build.build_in_background(options.in_background))))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from torchlens_perf.commands.doctor import BROKEN, WORSE, examine

    severities = []
    for check in examine():
        if check.severity or not options.quiet:
            print(printable(str(check)))
        severities.append(check.severity)
    broken, limited = severities.count(BROKEN), severities.count(WORSE)
    if not options.quiet:
        print(f"{len(severities)} checks: {broken} broken, {limited} with a limitation")
    return 1 if broken else 0
