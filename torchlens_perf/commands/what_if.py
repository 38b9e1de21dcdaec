"""`torchlens-perf what-if RUN_DIR CHANGE...`: predict the step time after changes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.commands.chosen_runs import find_newest_run
from torchlens_perf.commands.command import Command, argument
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import RunStoreError

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import LostTime, PredictedChange

CANNOT_SAY = 3
"""Exit code if the recorded steps do not suffice."""
_EXAMPLES = """changes:
  data=0, host=0, forward x0.5, optimizer x0.5, recompute=0, contention=0, communication x0.5
                           time of a part of the step
  rank=3@median, rank=all@median
                           ranks that are slower than the median rank compute as fast as it
  "module:blocks.*.mlp x0.5", section:tokenize=0
                           forward and backward time of modules, time of a section
  "bandwidth:GROUP x2"     transfers of a process group, or of an operation such as allreduce
  overlap=all              communication overlaps with computing as far as it fits
  bubble=0                 a pipeline without waits of its stages
  saving=0, evaluation=0, gc=0, compilation=0
                           what only some steps do"""


def _run_what_if(options: argparse.Namespace) -> int:
    from torchlens_perf.diagnosis.step_times import MIN_ROWS
    from torchlens_perf.diagnosis.what_if import MAX_CONTENTION, MAX_DRIFT, Replay, parse_change
    from torchlens_perf.report import report_json
    from torchlens_perf.report.run_report import load_report_and_states
    from torchlens_perf.report.usual_steps import read_usual_steps
    from torchlens_perf.run.directory import RunDirectory

    changes = [parse_change(text) for text in options.changes]
    run = RunDirectory(find_newest_run() if options.run == Path() else options.run)
    with Progress("reading the run", quiet=options.quiet) as progress:
        report, states = load_report_and_states(run, progress)
        lost = report["lost_time"]
        times = read_usual_steps(run, report, states)
    if lost is None or times is None:
        raise RunStoreError(
            f"{run.path} has fewer than {MIN_ROWS} usual steps that all ranks have made and whose"
            " times are known"
        )
    if lost.drift_share > MAX_DRIFT:
        print(
            f"torchlens-perf: cannot say: a replay without changes is {lost.drift_share:.0%} off the"
            " recorded steps, for example because ranks do not wait for each other",
            file=sys.stderr,
        )
        return CANNOT_SAY
    found = lost.changes
    if changes:
        predicted = Replay(times, report, report["verdicts"]).predict(changes)
        if predicted is None:
            print(
                f"torchlens-perf: cannot say: after the change, the ranks still wait for a CPU for"
                f" more than {MAX_CONTENTION:.0%} of a step, and less work also makes these waits"
                " shorter. Run the job on idle CPUs",
                file=sys.stderr,
            )
            return CANNOT_SAY
        found = [predicted]
    if options.json:
        report_json.write_json(
            {"step_s": lost.step_s, "drift_share": lost.drift_share, "changes": found},
            sys.stdout,
        )
    else:
        _print_gains(lost, found)
    return 0


def _print_gains(lost: LostTime, found: list[PredictedChange]) -> None:
    from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
    from torchlens_perf.view.lost_time_tables import build_gain_table
    from torchlens_perf.view.terminal import print_lines, table_lines

    lines = [
        f"A mean step takes {format_duration(lost.step_s)}. Without a change, the replay differs"
        f" from the recorded steps by {format_percent(lost.drift_share)}."
    ]
    if not found:
        lines.append("No single change would gain more than the uncertainty of its prediction.")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    if found:
        print_lines(
            lambda width: table_lines(build_gain_table(found), width, len(found)), sys.stdout
        )


COMMAND = Command(
    name="what-if",
    summary="predict the step time after a change",
    description=(
        "Predict by how much a mean step gets shorter after changes, by replaying the recorded"
        " steps. Several changes are made together. Without a change, show the most valuable"
        " single ones."
    ),
    epilog=_EXAMPLES,
    arguments=(
        argument("run", type=Path, metavar="RUN_DIR", help="a run directory, or . for the newest"),
        argument("changes", nargs="*", metavar="CHANGE", help="see below"),
        argument("--json", action="store_true", help="print JSON"),
    ),
    run=_run_what_if,
)
