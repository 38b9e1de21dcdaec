"""The declaration of a command: its arguments as rows, and the function that runs it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

FOUND, UNKNOWN = 1, 3
"""Exit codes: what the user asked about was found; the run has too little data to tell."""

Row: TypeAlias = Callable[[Any], object]
"""A row of a command: it adds an argument or a group of arguments to a parser."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the command line."""

    name: str
    summary: str = ""
    """The line in the help on all commands."""
    description: str | None = None
    usage: str | None = None
    epilog: str | None = None
    """Lines below the arguments, printed unchanged."""
    arguments: tuple[Row, ...] = ()
    run: Callable[[argparse.Namespace], int]
    """Run the command and return its exit code. Raises TorchlensPerfError for the user's mistakes."""

    def add_to(self, commands: Any) -> None:
        """Add the parser of this command to the subparsers of a parser."""
        formatter = argparse.RawDescriptionHelpFormatter if self.epilog else argparse.HelpFormatter
        parser = commands.add_parser(
            self.name,
            usage=self.usage,
            description=self.description,
            epilog=self.epilog,
            formatter_class=formatter,
        )
        for row in (*self.arguments, _QUIET):
            row(parser)
        parser.set_defaults(command=self.run)


def argument(*names: str, **options: Any) -> Row:
    """Return a row with one argument, as ArgumentParser.add_argument() takes it."""
    return lambda parser: parser.add_argument(*names, **options)


def one_of(*rows: Row) -> Row:
    """Return a row of arguments that exclude each other."""
    return lambda parser: _add_rows(parser.add_mutually_exclusive_group(), rows)


def titled(title: str, *rows: Row) -> Row:
    """Return a row of arguments below a title of their own."""
    return lambda parser: _add_rows(parser.add_argument_group(title), rows)


def versions_text() -> str:
    """Return the versions of this package, torch and Python, without importing torch."""
    from importlib import metadata

    from torchlens_perf.version import VERSION

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "torch is not installed"
    return f"torchlens-perf {VERSION} ({torch}, Python {'.'.join(map(str, sys.version_info[:3]))})"


def _add_rows(group: Any, rows: tuple[Row, ...]) -> None:
    for row in rows:
        row(group)


def print_note(options: argparse.Namespace, text: str) -> None:
    """Print a line on stderr, if there is a text, and if the user has not asked for quiet."""
    if text and not options.quiet:
        print(f"torchlens-perf: {text}", file=sys.stderr)


_QUIET = argument("--quiet", action="store_true", help="print only the result and errors")
