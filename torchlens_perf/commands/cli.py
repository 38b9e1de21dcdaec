"""The command line. Mistakes of the user are reported in one line, with exit code 2."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchlens_perf.commands import (
    capture,
    compare,
    deploy_files,
    fail_on,
    perfetto_trace,
    query,
    results,
    serve,
    simulate,
    top,
    what_if,
)
from torchlens_perf.commands import run as run_command
from torchlens_perf.commands.chosen_runs import find_newest_run
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import ConfigError, TorchlensPerfError, printable, unknown_word_text
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.without_pandas import block_pandas_import

_INTERRUPTED = 128 + signal.SIGINT
_GROUPS = {
    "Record a job": {
        "run": "record a Python script",
        "capture": "profile a few steps of a live run with torch.profiler",
    },
    "Look at a run": {
        "report": "print the report of a run, as text, JSON or a web page",
        "top": "watch a live run in the terminal",
        "serve": "show runs in a browser, live and finished",
        "what-if": "predict the step time after a change",
        "query": "run SQL on the tables of runs",
        "compare": "compare runs before and after a change, also in CI",
    },
    "Set up": {
        "doctor": "check the installation and the environment",
        "build-tap": "compile the native tap on collectives now",
        "deploy-files": "write alert rules, dashboards, Kubernetes and Slurm files",
    },
    "Try out and repair": {
        "simulate": "simulate a run with planted faults, and report on it",
        "sidecar": "read the ring files of a killed job, or replay a finished run",
    },
}
"""The commands in the help. `results` is internal and not listed."""
_NAMES = [name for group in _GROUPS.values() for name in group]
_HELP = """Start here:
  torchlens-perf run train.py    record a script
  torchlens-perf report          show the report of the newest run here
  torchlens-perf doctor          check the installation
{commands}

`torchlens-perf COMMAND --help` describes a command, `torchlens-perf --version` prints the version.
"""
_EXIT_CODES = """exit codes:
  0  the report was printed, and no verdict of --fail-on holds
  1  a verdict of --fail-on holds
  2  a mistake on the command line, or no run that can be read
  3  the run has too little data for a verdict of --fail-on"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, which is 130 after Ctrl-C, as in a shell.

    arguments: the command line; by default the one of this process.
    """
    is_program = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            sys.stdout.write(_help_text())
            return 0
        if arguments[0] == "--version":
            print(_versions_text())
            return 0
        if arguments[0] == "run" and arguments[1:2] not in (["-h"], ["--help"]):
            run_command.exec_recorded_python(arguments[1:])  # the new Python parses these arguments
        parser = _build_parser()
        if not arguments[0].startswith("-") and arguments[0] not in (*_NAMES, results.NAME):
            raise ConfigError(_unknown_command_text(arguments[0]))
        options = parser.parse_args(arguments)
        # doctor imports Dynamo, which needs pandas.
        if is_program and options.command is not _run_doctor:
            block_pandas_import()
        result: int = options.command(options)
        return result
    except TorchlensPerfError as error:
        print(f"torchlens-perf: {printable(str(error))}", file=sys.stderr)
        return 2
    except MemoryError:
        print(
            "torchlens-perf: there is not enough memory to read the files of the run",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("torchlens-perf: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # `torchlens-perf report | head` closed the pipe. Python would raise the error again when it
        # flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _help_text() -> str:
    lines = []
    for title, commands in _GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:14} {what}" for name, what in commands.items())]
    return _HELP.format(commands="\n".join(lines))


def _versions_text() -> str:
    """Return the versions of this package, torch and Python, without importing torch."""
    from importlib import metadata

    from torchlens_perf.version import VERSION

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "torch is not installed"
    return f"torchlens-perf {VERSION} ({torch}, Python {'.'.join(map(str, sys.version_info[:3]))})"


def _unknown_command_text(name: str) -> str:
    if name.endswith(".py"):
        return f"unknown command {name!r}: did you mean `torchlens-perf run {name}`?"
    return f"{unknown_word_text('command', name, _NAMES)} Commands: {', '.join(_NAMES)}"


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError. Its subparsers have the same class."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError. The original method would print the usage and exit."""
        raise ConfigError(
            f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{self.prog} --help`"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments. Raise ConfigError for unknown arguments, with a suggestion."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and rest[0].startswith("-"):
            options = re.findall(r"--[a-z][a-z-]*", self.format_usage())
            self.error(unknown_word_text("option", rest[0].split("=")[0], options))
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return found, rest


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torchlens-perf", add_help=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run_command.add_help(commands)

    report = commands.add_parser(
        "report",
        description=(
            "Print the report of a run, live or finished: which rank is slow, why, since when and"
            " at what cost, and what limits the step."
        ),
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument(
        "run_dir", type=Path, nargs="?", help="a run directory; default: the newest run here"
    )
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the report as a web page in one file that needs no network",
    )
    form.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="write the recorded steps as a trace for ui.perfetto.dev",
    )
    form.add_argument(
        "--chrome-traces",
        type=Path,
        metavar="DIR",
        help="write a trace in Chrome's format per rank into a new folder, as HolisticTraceAnalysis reads",
    )
    form.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON schema of --json, for which no run is needed",
    )
    perfetto_trace.add_arguments(report)
    report.add_argument(
        "--price-per-device-hour",
        type=float,
        metavar="PRICE",
        help="show costs; without devices, the price is that of an hour of one rank",
    )
    report.add_argument(
        "--fail-on",
        type=fail_on.parse_verdict_names,
        action="extend",
        default=[],
        metavar="VERDICT,...",
        help=(
            "exit with code 1 if the report contains one of these verdicts:"
            f" {', '.join(fail_on.KINDS)}"
        ),
    )
    report.set_defaults(command=_run_report)

    sidecar = commands.add_parser(
        "sidecar",
        description=(
            "Read the ring files that a killed job, or a job without a sidecar, has left on this"
            " node. Without ring files, replay a finished run from its records, to export it again."
        ),
    )
    sidecar.add_argument("run_dir", type=Path)
    sidecar.add_argument(
        "--host",
        default=None,
        help=(
            "the node whose ring files are read, by its name in nodes/NAME.json or its host name;"
            " default: this node"
        ),
    )
    sidecar.set_defaults(command=_run_sidecar)

    capture.add_command(commands)
    compare.add_command(commands)
    query.add_command(commands)
    what_if.add_command(commands)
    serve.add_command(commands)
    simulate.add_command(commands)
    results.add_command(commands)
    top.add_command(commands)
    deploy_files.add_command(commands)

    build_tap = commands.add_parser(
        "build-tap",
        description=(
            "Compile the native tap on collectives against the installed torch, with g++, in 10 to"
            " 30 s. Run the command once for each version of torch, and in images and CI. Without"
            " the tap, collectives are recorded from Python, which takes 9 us each from torch 2.14"
            " on and 50 us before, and end times of asynchronous collectives are missing."
        ),
    )
    build_tap.set_defaults(command=_run_build_tap)

    doctor = commands.add_parser(
        "doctor",
        description=(
            "Print what a run in this environment records, what it does not record, and what to"
            " do. The exit code is 1 if something is broken."
        ),
    )
    doctor.add_argument("--verbose", action="store_true", help="print each check")
    doctor.set_defaults(command=_run_doctor)
    for command in commands.choices.values():
        command.add_argument(
            "--quiet", action="store_true", help="print only the result and errors"
        )
    return parser


def _run_report(options: argparse.Namespace) -> int:
    from torchlens_perf.report import report_json

    if options.schema:
        if options.fail_on:
            raise ConfigError(
                "--fail-on needs a run, but --schema does not: remove one of these options"
            )
        report_json.write_json(report_json.build_schema(), sys.stdout)
        return 0
    from torchlens_perf.diagnosis.goodput import add_price
    from torchlens_perf.report.run_report import load_report_and_states
    from torchlens_perf.view.terminal import print_report

    run = RunDirectory(options.run_dir or find_newest_run())
    if options.html is not None:
        from torchlens_perf.page.document.write import write_page

        with Progress("writing the page", quiet=options.quiet):
            size = write_page(run, options.html, price=options.price_per_device_hour)
        if not options.quiet:
            print(
                f"torchlens-perf: wrote {printable(str(options.html))}, {size / 1e6:.2f} MB",
                file=sys.stderr,
            )
        if not options.fail_on:
            return 0
    if options.perfetto is not None or options.chrome_traces is not None:
        perfetto_trace.write_requested_trace(run, options)
        return 0
    with Progress("reading the run", quiet=options.quiet) as progress:
        value, states = load_report_and_states(run, progress)
    add_price(value["goodput"], options.price_per_device_hour)
    if options.json:
        report_json.write_json(value, sys.stdout)
    elif options.html is None:
        print_report(value, sys.stdout, str(run.path))
    code, why = fail_on.choose_exit_code(options.fail_on, value, states)
    if why and not options.quiet:
        print(f"torchlens-perf: {why}", file=sys.stderr)
    return code


def _run_sidecar(options: argparse.Namespace) -> int:
    from torchlens_perf.sidecar.start.process import read_or_replay

    replaying = Progress("replaying the run", quiet=options.quiet)
    return read_or_replay(options.run_dir.absolute(), options.host, replaying, quiet=options.quiet)


def _run_build_tap(options: argparse.Namespace) -> int:
    from torchlens_perf.commands import tap_build

    with Progress("compiling the native tap on collectives", quiet=options.quiet):
        built = tap_build.build_tap()
    if not options.quiet:
        print(printable(str(built)))
    return 0


def _run_doctor(options: argparse.Namespace) -> int:
    from torchlens_perf.commands.doctor import BROKEN, OK, run_checks, summarize

    checks = list(run_checks())
    if options.quiet:
        lines = [str(check) for check in checks if check.severity != OK]
    else:
        lines = [str(check) for check in checks] if options.verbose else list(summarize(checks))
    for line in lines:
        print(printable(line))
    return 1 if any(check.severity == BROKEN for check in checks) else 0
