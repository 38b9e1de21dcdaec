"""`torchlens-perf what-if RUN_DIR CHANGE...`: predict the step time after changes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.commands.chosen_runs import find_newest_run
from torchlens_perf.commands.command import UNKNOWN, Command, argument
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import RunStoreError, printable

if TYPE_CHECKING:
    from torchlens_perf.diagnosis.what_if import Change
    from torchlens_perf.verdicts.words.report import LostTime, PredictedChange

_HELP = """a CHANGE is what changes, and to what: =0 takes no time, x0.5 half the time

  rank=3@median            rank 3 computes as fast as the median rank
  rank=3,7@median          ranks 3 and 7 do
  rank=all@median          all ranks that are slower than the median rank do
  data=0, "forward x0.5"   a part of the step: data, forward, recompute, backward, optimizer,
                           host (host code), communication, contention (waits for a CPU)
  saving=0                 what only some steps do: saving, evaluation, gc, compilation
  "module:blocks.*.mlp x0.5"
                           forward and backward pass of modules; * stands for any text
  section:tokenize=0       a section of the program, perf.section("tokenize")
  "bandwidth:allreduce x2" transfers of a collective or of a process group are twice as fast
  overlap=all              communication overlaps with computing as far as it fits
  bubble=0                 the stages of a pipeline do not wait for each other

examples:
  torchlens-perf what-if RUN_DIR                                the five most valuable changes
  torchlens-perf what-if RUN_DIR rank=3@median
  torchlens-perf what-if RUN_DIR data=0 "optimizer x0.5"        both together"""
_CLAUSES = {
    "rank": "rank {name} computed as fast as the median rank",
    "rank=all": "each slower rank computed as fast as the median rank",
    "module": "modules matching {name} took {share}",
    "section": "section {name} took {share}",
    "contention": "waiting for a CPU took {share}",
    "saving": "saving checkpoints took {share}",
    "evaluation": "evaluation took {share}",
    "gc": "garbage collection took {share}",
    "compilation": "compilation took {share}",
    "bandwidth": "transfers of {name} were {factor:g} times as fast",
    "overlap": "communication overlapped with computing as far as it fits",
    "bubble": "the stages of the pipeline did not wait for each other",
}
"""Clauses by the subject of a change. Parts of the step have names of their own."""


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
            f"torchlens-perf: cannot predict: a replay without changes is {lost.drift_share:.0%} off the"
            " recorded steps, for example because ranks do not wait for each other",
            file=sys.stderr,
        )
        return UNKNOWN
    found = lost.changes
    if changes:
        predicted = Replay(times, report, report["verdicts"]).predict(changes)
        if predicted is None:
            print(
                f"torchlens-perf: cannot predict: after the change, the ranks still wait for a CPU for"
                f" more than {MAX_CONTENTION:.0%} of a step, and how much shorter less work makes these"
                " waits is not known. Run the job on idle CPUs",
                file=sys.stderr,
            )
            return UNKNOWN
        found = [predicted]
    if options.json:
        report_json.write_json(
            {"step_s": lost.step_s, "drift_share": lost.drift_share, "changes": found},
            sys.stdout,
        )
    else:
        _print_gains(lost, found, changes)
    return 0


def _print_gains(lost: LostTime, found: list[PredictedChange], asked: list[Change]) -> None:
    """Print the prediction for all changes together, or the found ones if no change was asked for."""
    from torchlens_perf.analysis.statistics.quantities import format_percent
    from torchlens_perf.view.lost_time_tables import build_gain_table
    from torchlens_perf.view.terminal import noted_table_lines, print_lines

    if found:
        print(printable(_describe_gain(asked, found[0], lost.step_s)))
    else:
        print("No single change would gain more than the uncertainty of its prediction.")
    if found and not asked:
        table = build_gain_table(found, lost.step_s)
        print_lines(lambda width: noted_table_lines(table, width, len(found)), sys.stdout)
    print(
        "A replay without any change differs from the recorded steps by"
        f" {format_percent(lost.drift_share)}."
    )


def _describe_gain(asked: list[Change], found: PredictedChange, mean_s: float) -> str:
    """Return a prediction as a sentence. asked: its changes, if they are not the single one of `found`.

    mean_s: the mean step.
    """
    from torchlens_perf.analysis.statistics.quantities import format_percent
    from torchlens_perf.diagnosis.what_if import parse_change
    from torchlens_perf.view.specs import Column

    clauses = map(_describe_change, asked or [parse_change(found.change)])
    # The share of a slow rank is of the steps in which the rank is slow.
    step_s = found.gain_s / found.share if found.share else mean_s
    steps = Column("step", [step_s, step_s - found.gain_s], unit_of=step_s)
    sign, less = (1, "less") if found.gain_s >= 0 else (-1, "more")
    gains = Column("gain", [sign * found.gain_s], unit_of=step_s)
    bounds = Column("bounds", sorted((sign * found.low_s, sign * found.high_s)), unit_of=step_s)
    now, after, gain, low, high = (text for each in (steps, gains, bounds) for text in each.texts())
    return (
        f"If {' and '.join(clauses)}, a step would take {after} {steps.unit} instead of {now}"
        f" {steps.unit}: {gain} {steps.unit} {less} ({format_percent(sign * found.share)}; at least {low}, at most"
        f" {high} {steps.unit})."
    )


def _describe_change(change: Change) -> str:
    """Return a change as a clause, such as "rank 3 computed as fast as the median rank"."""
    from torchlens_perf.analysis.statistics.quantities import format_percent
    from torchlens_perf.verdicts.words.phases import phase_name

    clause = _CLAUSES.get(f"{change.subject}={change.name}") or _CLAUSES.get(change.subject)
    share = f"{format_percent(change.factor)} of its time" if change.factor else "no time"
    clause = clause or f"{phase_name(change.subject)} took {{share}}"
    return clause.format(name=change.name, share=share, factor=change.factor)


COMMAND = Command(
    name="what-if",
    summary="predict the step time after a change",
    description=(
        "Predict by how much a mean step gets shorter after changes, by replaying the recorded"
        " steps. If you give several changes, they are predicted together. If none, the most valuable changes"
        " are shown."
    ),
    epilog=_HELP,
    arguments=(
        argument("run", type=Path, metavar="RUN_DIR", help="a run directory, or . for the newest"),
        argument("changes", nargs="*", metavar="CHANGE", help="see below"),
        argument("--json", action="store_true", help="print JSON"),
    ),
    run=_run_what_if,
)
