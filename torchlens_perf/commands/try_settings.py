"""`torchlens-perf try [--run RUN_DIR] [--set NAME=VALUE] -- COMMAND`: measure what a setting of torch gains."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.commands.chosen_runs import find_newest_run
from torchlens_perf.commands.compare import UNKNOWN, print_comparison, record_in_turn
from torchlens_perf.commands.progress import Progress
from torchlens_perf.config import TRIED
from torchlens_perf.errors import ConfigError, unknown_word_text
from torchlens_perf.run.settings_to_try import SETTINGS

if TYPE_CHECKING:
    from torchlens_perf.compare.comparison import Comparison
    from torchlens_perf.verdicts.words.report import Advice

NO_GAIN = 1
TRIES = "tries.jsonl"
"""File next to the runs, with a line for each try: settings, predicted and measured gain."""
_EXIT_CODES = f"""settings: {", ".join(SETTINGS)}

exit codes:
  0  the steps became faster
  1  they did not
  2  a mistake on the command line, or a failed command
  3  the noise is too large to tell"""


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "try",
        description=(
            "Run a command without and with other settings of torch in turn, and compare the steps."
            " The code of the job is not changed: constructors get the other values."
        ),
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run", type=Path, metavar="RUN_DIR",
        help="a run whose advice is tried if there is no --set; default: the newest run",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
        help="a setting or variable to try, such as loader.num_workers=4; may be repeated",
    )  # fmt: skip
    parser.add_argument("--times", type=int, default=5, help="runs of each side; default: 5")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("tried", nargs="+", metavar="-- COMMAND", help="the command that trains")
    parser.set_defaults(command=_run_try, markdown=False, html=None)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return settings and variables with their values. Raise ConfigError for an unknown setting."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name.isupper() and equals:
            found[name] = value
            continue
        if not equals or name not in SETTINGS:
            raise ConfigError(f"--set {text}: {unknown_word_text('setting', name, SETTINGS)}")
        try:
            found[name] = json.loads(value.lower())
        except ValueError:
            found[name] = value
    return found


def _run_try(options: argparse.Namespace) -> int:
    from torchlens_perf.compare.changes import Outcome
    from torchlens_perf.compare.comparison import compare_runs

    if options.times < 1:
        raise ConfigError(f"--times must be 1 or more, got {options.times}")
    advice = None
    if not options.settings:
        advice = _choose_advice(options.run or find_newest_run())
        options.settings = [advice["apply"]]
    settings = parse_settings(options.settings)
    if not options.quiet:
        print(f"torchlens-perf: trying {', '.join(options.settings)}", file=sys.stderr)
    variables = {name: value for name, value in settings.items() if name.isupper()}
    inside = {name: value for name, value in settings.items() if name not in variables}
    if inside:
        variables[TRIED] = json.dumps(inside)
    command = shlex.join(options.tried)
    before, after = record_in_turn(
        [command, command], options.times, quiet=options.quiet, changed=variables
    )
    with Progress("reading the runs", quiet=options.quiet) as progress:
        compared = compare_runs(before, after, progress)
    print_comparison(compared, options)
    _keep_result(before[0].parent.parent / TRIES, command, options.settings, advice, compared)
    if compared.step.outcome is not Outcome.CHANGED:
        return UNKNOWN if compared.step.outcome is Outcome.UNKNOWN else NO_GAIN
    return 0 if compared.step.difference < 0 else NO_GAIN


def _choose_advice(run: Path) -> Advice:
    """Return the best advice on a run that can be tried. Raise ConfigError without any."""
    from torchlens_perf.report.run_report import load_report
    from torchlens_perf.run.directory import RunDirectory

    for advice in load_report(RunDirectory(run))["advice"]:
        if advice["apply"]:
            return advice
    raise ConfigError(f"no advice on {run} can be tried from outside of the code: use --set")


def _keep_result(
    path: Path,
    command: str,
    settings: Sequence[str],
    advice: Advice | None,
    compared: Comparison,
) -> None:
    step = compared.step
    row = {
        "command": command,
        "settings": settings,
        "advice": advice and advice["key"],
        "predicted_s": advice and [advice["low_s"], advice["gain_s"], advice["high_s"]],
        "step_before_s": step.before,
        "gain_s": -step.difference,
        "low_s": -step.high,
        "high_s": -step.low,
        "outcome": step.outcome.value,
    }
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
