"""`torchlens-perf top`: show a live run in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.commands.command import Command, argument
from torchlens_perf.errors import RunStoreError, TorchlensPerfError
from torchlens_perf.run.installation import build_install_command

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.top.text import Terminal

_PLAIN_WIDTH = 100
_NICE = 10


def _run_top(options: argparse.Namespace) -> int:
    """Run the command.

    Raise RunStoreError if there is no run, TorchlensPerfError if Textual is missing.
    """
    from torchlens_perf.top.text import Terminal, detect_terminal

    terminal = detect_terminal()
    moves_cursor = os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    is_shown = all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
    if options.once or not (moves_cursor and is_shown):
        unicode = (sys.stdout.encoding or "").lower().startswith("utf") and not terminal.ascii_only
        color = terminal.color and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        return _run_plain_top(options.run, Terminal(not unicode, color), once=options.once)
    if importlib.util.find_spec("textual") is None:
        raise TorchlensPerfError(
            f"top needs Textual, which is not installed: {build_install_command('top')}. `top"
            " --once` works without Textual"
        )
    _lower_priority()
    from torchlens_perf.top.app import Top
    from torchlens_perf.top.live_runs import list_runs, select_live_runs

    folder, run = _find_folder_and_run(options.run)
    if run is None:
        found = select_live_runs(list_runs(folder))
        run = _to_run_directory(found[0].path) if len(found) == 1 else None
    app = Top(run, folder.absolute(), terminal)
    app.run(mouse=False)  # Mouse events would disable the terminal's own text selection.
    return app.return_code or 0


def _run_plain_top(path: Path | None, terminal: Terminal, *, once: bool) -> int:
    from torchlens_perf.top.live_runs import list_runs, select_live_runs
    from torchlens_perf.top.plain import PlainTop
    from torchlens_perf.top.reading import RunReader

    folder, run = _find_folder_and_run(path)
    if run is None:
        rows = list_runs(folder)
        run = _to_run_directory((select_live_runs(rows) or rows)[0].path) if rows else None
    if run is None:
        raise RunStoreError(f"no run in the folder {folder}: use `torchlens-perf top RUN_DIR`")
    reader, width = RunReader(run), shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns
    shown = PlainTop(sys.stdout, width, terminal)
    if not once:
        _lower_priority()
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to end the command.
            shown.print_until_end(reader.poll)
        return 0
    view = reader.poll()
    if view.report is None:
        raise RunStoreError(
            view.trouble if next(run.nodes.glob("*.json"), None) else run.why_unreadable()
        )
    shown.print_once(view)
    return 0


def _find_folder_and_run(path: Path | None) -> tuple[Path, RunDirectory | None]:
    """Return the folder of runs, and the named run or None."""
    from torchlens_perf.store.run_folders import default_folder
    from torchlens_perf.top.live_runs import list_runs

    run = _to_run_directory(path)
    if run is None:
        return default_folder(), None
    return (run.path, None) if list_runs(run.path) else (run.path.parent, run)


def _to_run_directory(path: Path | None) -> RunDirectory | None:
    """Return the run directory for a path or the name of a run. It may not exist yet."""
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.store.run_folders import default_folder

    if path is None:
        return None
    named = default_folder() / path
    return RunDirectory((named if not path.exists() and named.exists() else path).absolute())


def _lower_priority() -> None:
    """Lower this process's priority, because it may run on a node of the job."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)


COMMAND = Command(
    name="top",
    summary="watch a live run in the terminal",
    description=(
        "Show a live run: its verdicts, all ranks, and where the step's time goes. The command"
        " only reads the run directory: the job is not disturbed. Without a terminal"
        " (TERM=dumb, a pipe), the command prints new findings line by line."
    ),
    arguments=(
        argument(
            "run",
            type=Path,
            nargs="?",
            help=(
                "a run directory, which may not exist yet, or a folder of runs; default: the live run"
                " here, or a list of runs"
            ),
        ),
        argument(
            "--once",
            action="store_true",
            help="print the screen once as text and exit, without Textual",
        ),
    ),
    run=_run_top,
)
