"""The command line. Mistakes of the user are reported in one line, with exit code 2."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchlens_perf.commands import (
    act,
    capture,
    check,
    compare,
    deploy_files,
    query,
    report,
    results,
    run,
    serve,
    simulate,
    top,
    what_if,
)
from torchlens_perf.commands.command import Command, argument, versions_text
from torchlens_perf.commands.progress import Progress
from torchlens_perf.config import CHILD
from torchlens_perf.errors import ConfigError, TorchlensPerfError, printable, unknown_word_text
from torchlens_perf.store.without_pandas import block_pandas_import

_HELP = """Start here:
  torchlens-perf run train.py    record a script
  torchlens-perf report          show the report of the newest run here
  torchlens-perf doctor          check the installation
{commands}

`torchlens-perf COMMAND --help` describes a command, `torchlens-perf --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, which is 130 after Ctrl-C, as in a shell.

    arguments: the command line; by default the one of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A shell can start a program with a closed stdout.
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            lines = [
                line
                for title, commands in _GROUPS.items()
                for line in (
                    "",
                    f"{title}:",
                    *(f"  {each.name:14} {each.summary}" for each in commands),
                )
            ]
            sys.stdout.write(_HELP.format(commands="\n".join(lines)))
            return 0
        if words[0] == "--version":
            print(versions_text())
            return 0
        if words[0] == "run" and words[1:2] not in (["-h"], ["--help"]):
            run.exec_recorded_python(words[1:])
        parser = _build_parser()
        names = (*_COMMANDS, results.COMMAND.name)
        if not words[0].startswith("-") and words[0] not in names:
            raise ConfigError(_unknown_command_text(words[0]))
        options = parser.parse_args(words)
        # doctor imports Dynamo, which needs pandas.
        if arguments is None and options.command is not _run_doctor:
            block_pandas_import()
        return options.command(options)
    except TorchlensPerfError as error:
        # An argument is a line.
        return _fail("\n".join(map(printable, map(str, error.args))))
    except MemoryError:
        return _fail("there is not enough memory to read the files of the run")
    except KeyboardInterrupt:
        return _fail("interrupted", code=128 + signal.SIGINT)
    except OSError as error:
        # `torchlens-perf report | head` closed the pipe, or the disk is full. Python would raise the
        # error again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if isinstance(error, BrokenPipeError) else _fail(printable(str(error)))


def _fail(problem: str, code: int = 2) -> int:
    # The parent of a child process names the program in its own message.
    prefix = "" if CHILD in os.environ else "torchlens-perf: "
    print(f"{prefix}{problem}", file=sys.stderr)
    return code


def _unknown_command_text(name: str) -> str:
    if name.endswith(".py"):
        return f"unknown command {name!r}: did you mean `torchlens-perf run {name}`?"
    return f"{unknown_word_text('command', name, _COMMANDS)} Commands: {', '.join(_COMMANDS)}"


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError. Its subparsers have the same class."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError. The original method would print the usage and exit."""
        end = "" if message.endswith((".", "?")) else "."
        raise ConfigError(f"{message}{end} See `{self.prog} --help`")

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
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (*_COMMANDS.values(), results.COMMAND):
        command.add_to(subparsers)
    return parser


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

    checks, again = itertools.tee(run_checks())
    listed = (str(each) for each in checks if options.verbose or each.severity != OK)
    for line in listed if options.quiet or options.verbose else summarize(checks):
        print(printable(line), flush=True)
    return 1 if any(check.severity == BROKEN for check in again) else 0


_SIDECAR = Command(
    name="sidecar",
    summary="read the ring files of a killed job, or replay a finished run",
    description=(
        "Read the ring files that a killed job, or a job without a sidecar, has left on this"
        " node. Without ring files, replay a finished run from its records, to export it again."
    ),
    arguments=(
        argument("run_dir", type=Path),
        argument(
            "--host",
            default=None,
            help=(
                "the node whose ring files are read, by its name in nodes/NAME.json or its host"
                " name; default: this node"
            ),
        ),
    ),
    run=_run_sidecar,
)
_BUILD_TAP = Command(
    name="build-tap",
    summary="compile the native tap on collectives now",
    description=(
        "Compile the native tap on collectives against the installed torch, with g++, in 10 to"
        " 30 s. Run the command once for each version of torch, and in images and CI. Without"
        " the tap, collectives are recorded from Python, which takes 9 us each from torch 2.14"
        " on and 50 us before, and end times of asynchronous collectives are missing."
    ),
    run=_run_build_tap,
)
_DOCTOR = Command(
    name="doctor",
    summary="check the installation and the environment",
    description=(
        "Print what a run in this environment records, what it does not record, and what to"
        " do. The exit code is 1 if something is broken."
    ),
    arguments=(argument("--verbose", action="store_true", help="print each check"),),
    run=_run_doctor,
)
_GROUPS = {
    "Record a job": (run.COMMAND, capture.COMMAND),
    "Look at a run": (
        report.COMMAND,
        top.COMMAND,
        serve.COMMAND,
        what_if.COMMAND,
        query.COMMAND,
        compare.COMMAND,
    ),
    "Act on verdicts": (act.ACT, act.OFFENDERS, act.MCP),
    "Set up": (_DOCTOR, check.COMMAND, _BUILD_TAP, deploy_files.COMMAND),
    "Try out and repair": (simulate.COMMAND, _SIDECAR),
}
"""The commands in the help. `results` is internal and not listed."""
_COMMANDS = {command.name: command for group in _GROUPS.values() for command in group}
