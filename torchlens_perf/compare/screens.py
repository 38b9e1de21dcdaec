"""A comparison as a headline and tables, for the terminal, Markdown and HTML."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torchlens_perf.analysis.statistics.quantities import (
    format_change,
    format_duration,
    format_percent,
)
from torchlens_perf.compare.changes import (
    MOST_RUNS,
    Change,
    Outcome,
    count_runs_to_decide,
    find_detectable,
)
from torchlens_perf.compare.comparison import MARGIN, Comparison
from torchlens_perf.compare.measures import DETAILS, STEP, Kind, Measure, compute_by_rank
from torchlens_perf.compare.verdict_changes import VerdictChange
from torchlens_perf.page.sections.overview import format_minute
from torchlens_perf.verdicts.kinds import BAD, GOOD, NEUTRAL, WARNING
from torchlens_perf.verdicts.words.run_state import describe_run_state
from torchlens_perf.view.headline import Headline, build_headlines, describe_status
from torchlens_perf.view.specs import Column, Quantity, Table, sanitize_line

_MAX_ROWS = 20
_MAX_NAMED = 3
# The share of a step that waits for a CPU, from which a quieter machine would tell more.
_MUCH_CONTENTION = 0.1


def build_headline(compared: Comparison) -> Headline:
    """Return the result for the typical step, with the parts and details that changed with it."""
    status, severity = _choose_status(compared, compared.step)
    return Headline(
        kind="comparison",
        status=status,
        severity=severity,
        facts=(
            ("runs before", str(len(compared.before))),
            ("runs after", str(len(compared.after))),
        ),
        cost_s_per_step=None,
        cost_share=None,
        sentence=" ".join(
            [
                *(
                    f"{'' if each.what == 'changed' else f'{each.what}: '}"
                    f"{describe_verdict_change(compared, each)}"
                    for each in compared.verdicts
                ),
                describe_times(compared),
            ]
        ),
        cause="",
        action=_suggest_action(compared, compared.step),
        command=(
            f"torchlens-perf report {compared.after[-1].run.path}"
            if compared.step.outcome is Outcome.CHANGED
            else ""
        ),
        is_over=False,
    )


def _choose_status(compared: Comparison, step: Change) -> tuple[str, str]:
    if step.outcome is Outcome.CHANGED:
        return ("SLOWER", BAD) if step.difference > 0 else ("FASTER", GOOD)
    if compared.list_changed(*Kind) or any(each.is_certain for each in compared.verdicts):
        return "CHANGED", WARNING
    return ("SAME", GOOD) if step.outcome is Outcome.SAME else ("CANNOT SAY", NEUTRAL)


def describe_times(compared: Comparison) -> str:
    """Return sentences on the typical step, and on the parts and details that changed."""
    is_one_each = len(compared.before) == len(compared.after) == 1
    sentences = [
        _describe_step(compared.step, is_one_each),
        _describe_changes(compared, compared.step),
    ]
    if compared.step.outcome is not Outcome.CHANGED:
        # The status is then about the parts and details.
        sentences.reverse()
    return " ".join(filter(None, sentences))


def _describe_step(step: Change, is_one_each: bool) -> str:
    smallest = format_percent(step.detectable / step.before)
    certainty = {
        Outcome.CHANGED: f" (95 % interval: {_format_interval(step)}).",
        Outcome.SAME: f". A change of {smallest} or more would have been found.",
        Outcome.UNKNOWN: (
            ". Whether it changed is not known: one run of each side does not show how much runs differ."
            if is_one_each
            else f". Whether it changed is not known: these runs can only show changes of {smallest} or more."
        ),
    }
    return (
        f"A typical step took {format_duration(step.before)} before and {format_duration(step.after)} after:"
        f" {format_change(step.share)}{certainty[step.outcome]}"
    )


def describe_verdict_change(compared: Comparison, change: VerdictChange) -> str:
    """Return a verdict that came, went or has another subject, and the runs that have it."""
    before, after = len(compared.before), len(compared.after)
    return sanitize_line(
        f"{change.text} (found in {change.before} of {before} runs before, and {change.after} of {after} after)."
    )


def _describe_changes(compared: Comparison, step: Change) -> str:
    """Return sentences on the parts and details that changed most; "" if none changed."""
    parts = [
        f"{measure.name} {_format_signed(change.difference, measure)}"
        for measure, change in compared.list_changed(Kind.PART)[:_MAX_NAMED]
    ]
    details = [
        f"{measure.kind.value} {measure.name} {_format_signed(change.difference, measure)}"
        for measure, change in compared.list_changed(*DETAILS, Kind.MEMORY)[:_MAX_NAMED]
    ]
    begin = (
        f"Parts of {_format_signed(step.difference, STEP)}"
        if step.outcome is Outcome.CHANGED
        else "Changed parts"
    )
    sentences = [f"{begin}: {', '.join(parts)}."] if parts else []
    sentences += [f"Largest other changes: {', '.join(details)}."] if details else []
    return sanitize_line(" ".join(sentences))


def _suggest_action(compared: Comparison, step: Change) -> str:
    """Return what would tell whether the step changed, by the noise of these runs."""
    if step.outcome is not Outcome.UNKNOWN:
        return ""
    everyone = (*compared.before, *compared.after)
    tested = sum(each.kind not in DETAILS for each in compared.changes)
    runs = count_runs_to_decide(step, MARGIN * step.before, tested)
    differ = f"step times of runs of one side differ by {format_percent(step.spread / step.before)}"
    if min(len(compared.before), len(compared.after)) == 1:
        why = "because one run does not show how much runs differ"
        found = [f"record 5 runs of each side, alternating, {why}"]
    elif runs is None:
        smallest = format_percent(find_detectable(step, MOST_RUNS, tested) / step.before)
        found = [
            f"even {MOST_RUNS} runs of each side would not show a change below {smallest} ({differ})"
        ]
    else:
        found = [
            f"record {runs} runs of each side, alternating, to tell a change from noise ({differ})"
        ]
    in_run = sum(each.noise_of(STEP) ** 2 for each in everyone) / len(everyone)
    if 2 * in_run >= step.spread**2:
        steps = sum(each.report["steps"]["count"] for each in everyone) // len(everyone)
        found.append(
            f"record more than {steps} steps in each run, because most noise is within runs"
        )
    contention = max(each.contention_share for each in everyone)
    if contention >= _MUCH_CONTENTION:
        share = format_percent(contention)
        found.append(
            f"use a less busy machine: steps wait for a CPU for up to {share} of their time"
        )
    return "; ".join(found)


def build_tables(compared: Comparison, *, all_details: bool = False) -> list[Table]:
    """Return tables of the runs, the step and its parts, the ranks, and the details that changed.

    all_details: True for all details, those that changed first.
    """
    details = [each for each in compared.changes if each.kind in DETAILS]
    changed = [measure for measure, _ in compared.list_changed(*DETAILS)]
    shown = [*changed, *(each for each in details if all_details and each not in changed)]
    title = (
        "Modules, sections, collectives"
        if all_details
        else "Changed modules, sections, collectives"
    )
    found = [
        _build_run_table(compared),
        _build_table(
            compared,
            "step",
            "Step",
            [each for each in compared.changes if each.kind not in DETAILS],
        ),
        *_build_rank_tables(compared),
        *([_build_table(compared, "details", title, shown)] if shown else []),
    ]
    if details:
        unknown = sum(compared.changes[each].outcome is Outcome.UNKNOWN for each in details)
        note = (
            f"{len(details)} modules, sections and collectives compared: {len(changed)} changed,"
            f" {unknown} cannot be told from noise, {len(details) - len(changed) - unknown} same."
        )
        at = -1 if shown else 1
        found[at] = dataclasses.replace(found[at], note=note)
    return found


def _build_run_table(compared: Comparison) -> Table:
    """Return the table of the compared runs, with what identifies each of them."""
    runs = [*compared.before, *compared.after]
    about = [each.report["run"] for each in runs]
    sides = ["before"] * len(compared.before) + ["after"] * len(compared.after)
    columns = [
        Column("side", sides, Quantity.TEXT),
        Column("run", [each.run.run_id for each in runs], Quantity.TEXT),
        Column("program", [each["program"] for each in about], Quantity.TEXT),
        Column("status", [describe_status(build_headlines(each.report)) for each in runs], Quantity.TEXT,
               wraps=True),
        Column("started", [each["started"] and format_minute(each["started"]) for each in about], Quantity.TEXT, 0.5),
        Column("commit", [each["settings"].get("commit") for each in about], Quantity.TEXT, 0.7),
        Column("state", [describe_run_state(each) for each in about], Quantity.TEXT, 0.8),
        Column("ranks", [each["world_size"] for each in about], Quantity.NUMBER, 0.6),
        Column("steps", [each.report["steps"]["count"] for each in runs], Quantity.NUMBER, 0.6),
    ]  # fmt: skip
    return Table("runs", "Runs", columns, first=_MAX_ROWS, noun="run")


def _build_rank_tables(compared: Comparison) -> list[Table]:
    """Return a table of the compute time of each rank, the largest difference first.

    Return [] if fewer than two ranks were measured on both sides.
    """
    before, after = (compute_by_rank(side[0].report) for side in (compared.before, compared.after))
    ranks = sorted(before.keys() & after.keys(), key=lambda rank: -abs(after[rank] - before[rank]))
    if len(ranks) < 2:
        return []
    unit_s = max(*before.values(), *after.values())
    columns = [
        Column("rank", ranks, Quantity.TEXT),
        Column("before", [before[rank] for rank in ranks], unit_of=unit_s),
        Column("after", [after[rank] for rank in ranks], unit_of=unit_s),
        Column("change", [after[rank] / before[rank] - 1 for rank in ranks], Quantity.CHANGE),
    ]
    return [
        Table(
            "ranks",
            "Compute time of each rank",
            columns,
            first=_MAX_ROWS,
            note="In the first run of each side. These changes are not tested against noise.",
            noun="rank",
        )
    ]


def _build_table(compared: Comparison, key: str, title: str, rows: Sequence[Measure]) -> Table:
    changes = [compared.changes[each] for each in rows]
    times = (
        max(each.before, each.after)
        for of, each in zip(rows, changes, strict=True)
        if of.kind is not Kind.MEMORY
    )
    unit_s = max(times, default=0.0)
    slower = (
        at for at, each in enumerate(changes)
        if each.outcome is Outcome.CHANGED and each.difference > 0
    )  # fmt: skip
    columns = [
        Column("measure", [_label_measure(each) for each in rows], Quantity.TEXT),
        Column(
            "before",
            [_format_value(each.before, of) for of, each in zip(rows, changes, strict=True)],
            unit_of=unit_s,
        ),
        Column(
            "after",
            [_format_value(each.after, of) for of, each in zip(rows, changes, strict=True)],
            unit_of=unit_s,
        ),
        Column("change", [each.share for each in changes], Quantity.CHANGE),
    ]
    # One run of each side does not show how much runs differ.
    columns += (
        []
        if len(compared.before) == len(compared.after) == 1
        else [
            Column(
                "95 % interval",
                [
                    f"{_format_signed(each.low, of)} to {_format_signed(each.high, of)}"
                    for of, each in zip(rows, changes, strict=True)
                ],
                Quantity.NUMBER,
                optional=2,
                help="All intervals hold together with a probability of 95 %.",
            ),
            Column(
                "detectable",
                [of.format(each.detectable) for of, each in zip(rows, changes, strict=True)],
                Quantity.NUMBER,
                optional=1,
                help="Smallest change that 4 of 5 such comparisons would find.",
            ),
            Column("result", [each.outcome.value for each in changes], Quantity.TEXT),
        ]
    )
    return Table(key, title, columns, frozenset(slower), _MAX_ROWS, noun="measure")


def _label_measure(measure: Measure) -> str:
    return f"{measure.kind.value} {measure.name}" if measure.kind in DETAILS else measure.name


def _format_value(value: float, measure: Measure) -> float | str:
    return measure.format(value) if measure.kind is Kind.MEMORY else value


def _format_signed(value: float, measure: Measure) -> str:
    # A difference that rounds to zero has no direction.
    is_less = value < 0 and measure.format(-value) != measure.format(0.0)
    return f"{'-' if is_less else '+'}{measure.format(abs(value))}"


def _format_interval(change: Change) -> str:
    # No time falls by more than all of it.
    low = max(-1.0, change.low / change.before)
    return f"{format_change(low)} to {format_change(change.high / change.before)}"


def build_notes(compared: Comparison) -> list[str]:
    """Return sentences on what limits the comparison."""
    found = list(dict.fromkeys(compared.notes))
    for name, only in (("before", compared.only_before), ("after", compared.only_after)):
        if only:
            names = ", ".join(sanitize_line(_label_measure(each)) for each in only[:_MAX_NAMED])
            more = f" and {len(only) - _MAX_NAMED} more" if len(only) > _MAX_NAMED else ""
            found.append(f"only {name}: {names}{more}")
    found.append(f"a change below {MARGIN:.0%} of the step time is shown as the same")
    return found
