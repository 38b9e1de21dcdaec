"""`torchlens-perf compare A B`: what changed between runs, by how much, and how certain it is."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.commands.chosen_runs import find_runs
from torchlens_perf.commands.command import FOUND, UNKNOWN, Command, argument, one_of, print_note
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import RunStoreError, printable, require

if TYPE_CHECKING:
    from torchlens_perf.compare.comparison import Comparison

_BUDGETS = ("step", "data", "forward", "recompute", "backward", "optimizer", "memory")
_EXIT_CODES = """exit codes:
  0  the comparison was printed, and no budget of --fail-on is exceeded
  1  a budget is exceeded
  2  a mistake on the command line, a failed command, or a run that cannot be read
  3  the noise is too large to tell whether a budget is exceeded"""
_RECORDED_S = 60.0


def _parse_budgets(text: str) -> dict[str, float]:
    """Return the budget of each measure, as a share. Raise ArgumentTypeError for invalid text."""
    found = {}
    for each in text.split(","):
        name, equals, value = each.strip().rpartition("=")
        try:
            share = float(value.removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if share < 0 or (equals and name not in _BUDGETS):
            raise argparse.ArgumentTypeError(
                f"invalid budget {each!r}: use a percentage such as 2%, or"
                f" MEASURE=2% with a measure of {', '.join(_BUDGETS)}"
            )
        found[name or "step"] = share
    return found


def _run_compare(options: argparse.Namespace) -> int:
    from torchlens_perf.compare.comparison import compare_runs

    before, after = _find_sides(options)
    with Progress("reading the runs", quiet=options.quiet) as progress:
        compared = compare_runs(before, after, progress)
    _print_comparison(compared, options)
    code, why = choose_exit_code(options.fail_on, compared)
    print_note(options, why)
    return code


def _find_sides(options: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """Return the runs before and after. Raise ConfigError unless exactly two sides are named."""
    ways = (options.sides, options.before or options.after, options.started)
    require(
        sum(map(bool, ways)) == 1,
        "name the runs in one way: two folders, --before and --after, or --run twice."
        " See `torchlens-perf compare --help`",
    )
    if options.started:
        require(
            len(options.started) == 2 and options.times >= 1,
            "--run needs two commands, before and after, and --times 1 or more",
        )
        return _record_in_turn(options)
    if options.sides:
        require(
            len(options.sides) == 2,
            f"compare needs two folders, before and after, got {len(options.sides)}",
        )
        before, after = (find_runs(each) for each in options.sides)
        return before, after
    require(bool(options.before and options.after), "both --before and --after are needed")
    return options.before, options.after


def _record_in_turn(options: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """Run both commands in turn and return their run directories.

    The order is reversed each time, so a slow drift of the machine affects both sides equally.
    """
    parent = Path(os.environ.get("TORCHLENS_PERF_DIR", "torchlens-perf")).absolute()
    folder = parent / f"compare-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    sides: tuple[list[Path], list[Path]] = ([], [])
    for number in range(options.times):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            name = f"{('before', 'after')[side]}-{number + 1}"
            print_note(options, f"recording {name} of {options.times}")
            sides[side].append(_record_command(options.started[side], folder, name))
    return sides


def _record_command(command: str, folder: Path, name: str) -> Path:
    environment = {
        "TORCHLENS_PERF": "1", "TORCHLENS_PERF_REPORT": "off", **os.environ,
        "TORCHLENS_PERF_DIR": str(folder), "TORCHLENS_PERF_RUN_ID": name,
    }  # fmt: skip
    # The command's output is not part of the comparison, which may be JSON on stdout.
    code = subprocess.run(command, shell=True, env=environment, stdout=sys.stderr).returncode
    if code:
        raise RunStoreError(f"{command!r} ended with exit code {code}: nothing is compared")
    run = folder / name
    deadline = time.monotonic() + _RECORDED_S
    while not _is_complete(run):
        if time.monotonic() > deadline or not run.exists():
            raise RunStoreError(
                f"{command!r} recorded no complete run in {run}: `torchlens-perf doctor` and the"
                " log in its folder nodes may show why"
            )
        time.sleep(0.1)
    return run


def _is_complete(run: Path) -> bool:
    from torchlens_perf.report.run_report import load_report
    from torchlens_perf.run.directory import RunDirectory

    try:
        return not load_report(RunDirectory(run), lost_time=False)["run"]["live"]
    except RunStoreError:
        return False


def _print_comparison(compared: Comparison, options: argparse.Namespace) -> None:
    """Print in the form that the options choose: json, markdown, html or text."""
    from torchlens_perf.compare import screens

    if options.json:
        from torchlens_perf.compare.comparison_json import to_dictionary
        from torchlens_perf.report import report_json

        report_json.write_json(to_dictionary(compared), sys.stdout)
    elif options.markdown:
        from torchlens_perf.view import markdown

        blocks = (
            markdown.headline_lines(screens.build_headline(compared)),
            *map(markdown.table_lines, screens.build_tables(compared)),
            (f"- {markdown.escaped(note)}" for note in screens.build_notes(compared)),
        )
        print("\n\n".join(map("\n".join, blocks)))
    elif options.html is not None:
        from torchlens_perf.compare.page import write_comparison_page

        write_comparison_page(compared, options.html)
        print_note(options, f"wrote {printable(str(options.html))}")
    else:
        from torchlens_perf.view.terminal import print_tables

        print_tables(
            screens.build_headline(compared),
            screens.build_tables(compared),
            screens.build_notes(compared),
            sys.stdout,
        )


def choose_exit_code(budgets: Mapping[str, float], compared: Comparison) -> tuple[int, str]:
    """Return 0, FOUND or UNKNOWN, and a line with the reason.

    A budget is exceeded if the measure changed by more than the budget. If no change was found, the
    upper bound of its interval must not exceed the budget; otherwise the result is UNKNOWN.
    """
    from torchlens_perf.compare.changes import Outcome
    from torchlens_perf.compare.measures import PEAK_MEMORY, STEP, Kind, Measure

    named = {"step": STEP, "memory": PEAK_MEMORY}
    exceeded, unknown = [], []
    for name, budget in budgets.items():
        change = compared.changes.get(named.get(name, Measure(Kind.PART, name)))
        if change is None:
            unknown.append(f"{name} was not measured both before and after")
        elif change.outcome is Outcome.CHANGED and change.share > budget:
            exceeded.append(f"{name} {change.share:+.1%} (budget {budget:.1%})")
        elif change.outcome is not Outcome.CHANGED and change.high / change.before > budget:
            at_most = change.high / change.before
            unknown.append(f"{name} may have grown by up to {at_most:.1%} (budget {budget:.1%})")
    if exceeded:
        return FOUND, f"--fail-on: exceeded {'; '.join(exceeded)}"
    return (
        (UNKNOWN, f"--fail-on: cannot tell whether the budget is exceeded: {'; '.join(unknown)}")
        if unknown
        else (0, "")
    )


COMMAND = Command(
    name="compare",
    summary="compare runs before and after a change, also in CI",
    description=(
        "Compare runs before and after a change: the step and its phases, memory, modules, sections of"
        " perf.section() and collectives. Each run is one sample, so record about five of each side."
    ),
    epilog=_EXIT_CODES,
    arguments=(
        argument(
            "sides",
            type=Path,
            nargs="*",
            metavar="RUNS",
            help="before and after: two run directories, or two folders of runs",
        ),
        argument("--before", type=Path, nargs="+", default=[], metavar="RUN_DIR"),
        argument("--after", type=Path, nargs="+", default=[], metavar="RUN_DIR"),
        argument(
            "--run",
            action="append",
            default=[],
            metavar="COMMAND",
            dest="started",
            help=(
                "a shell command to record; give it twice: before and after, such as"
                " 'python train.py' and 'OMP_NUM_THREADS=4 python train.py'"
            ),
        ),
        argument(
            "--times", type=int, default=5, help="how often --run starts each command; default: 5"
        ),
        argument(
            "--fail-on",
            type=_parse_budgets,
            default={},
            metavar="BUDGET",
            help="exit with 1 above a budget: 2%%, or step=2%%,forward=5%%,memory=5%%",
        ),
        one_of(
            argument("--json", action="store_true", help="print JSON"),
            argument("--markdown", action="store_true", help="print Markdown, for a pull request"),
            argument("--html", type=Path, metavar="FILE", help="write a web page"),
        ),
    ),
    run=_run_compare,
)
