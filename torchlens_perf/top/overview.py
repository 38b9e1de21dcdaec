"""The lines of the first screen: the run, its findings, step times, the ranks, and other tables of
the report.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import format_coverage, format_duration
from torchlens_perf.roles.evidence import describe_iterations
from torchlens_perf.top.pace import describe_pace, draw_curve, window_median_step_s
from torchlens_perf.top.ranks import build_rank_list
from torchlens_perf.top.text import (
    Terminal,
    draw_rule,
    join_fitting,
    lines_around_cursor,
    unwrapped_line,
)
from torchlens_perf.verdicts.kinds import BAD, GOOD, WARNING
from torchlens_perf.verdicts.words.run_state import describe_ranks, describe_state, join_state
from torchlens_perf.view.headline import Headline, choose_headline
from torchlens_perf.view.specs import Table, sanitize_line
from torchlens_perf.view.step_words import describe_overhead
from torchlens_perf.view.tables import build_tables
from torchlens_perf.view.terminal import (
    bar_lines,
    headline_lines,
    held_verdict_lines,
    stack_lines,
    table_lines,
    verdict_lines,
)
from torchlens_perf.view.theme import SEVERITIES

if TYPE_CHECKING:
    from torchlens_perf.top.reading import View
    from torchlens_perf.verdicts.words.report import Report

_DAY_S = 86_400
# Numbers of lines.
_MAX_OTHERS, _MAX_RANKS, _MIN_RANKS, _MAX_CHART, _MIN_TABLE = 3, 32, 3, 4, 3
_FEW_RANKS = 4


def build_overview(
    view: View, width: int, height: int, terminal: Terminal, ranks: Table, cursor: int
) -> list[Text]:
    """Return the screen in at most `height` lines.

    cursor: the selected row of `ranks`, which is always visible.
    """
    report = view.report
    lines = terminal.lines([title_line(view, width), *trouble_lines(view)], width)
    if report is None:
        return lines
    lines += terminal.lines(
        [*finding_lines(view, width), *map(unwrapped_line, describe_iterations(report))], width
    )
    stacks = [each for row in report["verdicts"][:1] for each in stack_lines(row, width)]
    lines += stacks if len(lines) + len(stacks) <= height // 2 else []
    bars = bar_lines(
        report, choose_headline(view.headlines), width, color=terminal.color, each=_FEW_RANKS
    )
    # The rates and at least one line of step times take 2 lines.
    rows, room = ranks.rows + 2, height - len(lines) - 2
    below = bars if room >= min(rows, _MIN_RANKS + 2) + len(bars) else []
    room -= len(below)
    chart = 1 + max(0, min(room - rows, _MAX_CHART - 1))
    room -= chart - 1
    lines += pace_lines(view, width, chart)
    table = lines_around_cursor(ranks, width, room, cursor)
    return [*lines, *table, *below, *_other_tables(report, width, room - len(table))][:height]


def _other_tables(report: Report, width: int, room: int) -> list[Text]:
    """Return as many of the report's other tables as fit, and a line on lost data and overhead."""
    lines = list[Text]()
    for table in build_tables(report) if room > _MIN_TABLE + 4 else ():
        rows = min(table.first or table.rows, room - len(lines) - 6)
        if table.key not in ("ranks", "device_times") and rows >= min(_MIN_TABLE, table.rows):
            lines += [unwrapped_line(), *table_lines(table, width, rows)]
    return (
        [*lines, unwrapped_line(), quality_line(report, width)] if room >= len(lines) + 2 else lines
    )


def build_frame(view: View, width: int, terminal: Terminal) -> list[Text]:
    """Return the run with all findings as one frame of any length, for scripts and logs."""
    texts = [title_line(view, width), *trouble_lines(view)]
    if view.report is not None:
        ranks, _ = build_rank_list(view)
        texts += [
            *all_finding_lines(view, width),
            *map(unwrapped_line, describe_iterations(view.report)),
            *pace_lines(view, width, 1),
            unwrapped_line(),
        ]
        texts += (
            [*table_lines(ranks, width, min(ranks.rows, _MAX_RANKS)), unwrapped_line()]
            if ranks.rows
            else []
        )
        main = choose_headline(view.headlines)
        texts += bar_lines(view.report, main, width, color=terminal.color, each=_FEW_RANKS)
        texts += [unwrapped_line(), *note_lines(view, width)]
    return terminal.lines(texts, width)


# -- the run


def title_line(view: View, width: int) -> Text:
    """Return the title line with the name and the state of the run."""
    report, (state, style) = view.report, run_state_and_style(view)
    left = f"torchlens-perf top  {view.run_id}"
    if report is not None:
        run = report["run"]
        attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
        program = f"{run['program']}  " if run["program"] else ""
        left = f"{program}{view.run_id}  {describe_ranks(run)}{attempt}"
    found = unwrapped_line((sanitize_line(left), "bold"))
    found.truncate(max(0, width - len(state) - 1), overflow="ellipsis", pad=True)
    return found.append(" ").append(sanitize_line(state), style=style)


def run_state_and_style(view: View) -> tuple[str, str]:
    """Return the state of the run in a few words, and their style."""
    report, bad = view.report, SEVERITIES[BAD].terminal
    if report is None:
        return "waiting" if view.trouble else "reading", SEVERITIES[WARNING].terminal
    run = report["run"]
    state, which = describe_state(run)
    if not run["live"]:
        at = format_clock_time(run["ended"]) if run["ended"] else ""
        words = join_state(f"{state.upper()} {at}".rstrip(), which)
        return words, bad if run["died"] or run["failed"] else "bold"
    as_of = f" {format_clock_time(run['as_of'])}" if run["as_of"] else ""
    return join_state(f"LIVE{as_of}", which), bad if which else SEVERITIES[GOOD].terminal


def trouble_lines(view: View) -> list[Text]:
    """Return lines on the reason why the view is not up to date; no line if it is."""
    if not view.trouble:
        return []
    text = view.trouble + ("" if view.has_ended else ". Looking again every second.")
    return [Text(sanitize_line(text), style=SEVERITIES[WARNING].terminal)]


def format_clock_time(time: str, now_s: float | None = None) -> str:
    """Return a time of the report in the local time zone, with the day if it is older than 24
    hours.
    """
    at = datetime.datetime.fromisoformat(time).astimezone()
    now = datetime.datetime.now().timestamp() if now_s is None else now_s
    return at.strftime("%H:%M:%S" if abs(now - at.timestamp()) < _DAY_S else "%Y-%m-%d %H:%M")


# -- findings


def finding_lines(view: View, width: int) -> list[Text]:
    """Return the headline of the run in full, and a line for each other finding."""
    first = choose_headline(view.headlines)
    if first is None:
        return []
    others = [
        each
        for each in view.headlines
        if each is not first and (each.severity != GOOD or each.is_over)
    ]
    lines = verdict_lines(first, width)
    lines += [
        line
        for each in others[:_MAX_OTHERS]
        for line in headline_lines(each, width, "earlier" if each.is_over else "")
    ]
    more = len(others) - _MAX_OTHERS
    return [*lines, unwrapped_line((f"  {more} more: press v", "dim"))] if more > 0 else lines


def all_finding_lines(view: View, width: int) -> list[Text]:
    """Return all headlines in full, with their validity and the Python stacks of a hang."""
    if view.report is None:
        return []
    return [
        line
        for of, row in zip(view.headlines, view.report["verdicts"], strict=True)
        for line in (*held_verdict_lines(of, row, view.report, width), unwrapped_line())
    ]


def finding_key(of: Headline) -> Sequence[object]:
    """Return a key that identifies a finding.

    The key excludes numbers, which change with every poll.
    """
    facts = dict(of.facts)
    return (
        of.kind,
        facts.get("rank"),
        facts.get("ranks"),
        of.is_over,
        of.is_over and facts.get("steps"),
    )


# -- step times


def pace_lines(view: View, width: int, height: int) -> list[Text]:
    """Return progress and rates, and a chart of `height` lines of step time over the run."""
    assert view.report is not None
    words = join_fitting(describe_pace(view.report, view.seen_s), max(1, width - 4))
    values = window_median_step_s(view.report)
    first = draw_rule(words, width)
    if len(values) < 2:
        return [first, unwrapped_line()]
    low, high = format_duration(min(values)), format_duration(max(values))
    scale = (
        [high, *[""] * (height - 2), low]
        if height > 1
        else [low if low == high else f"{low} to {high}"]
    )
    label = "  step time   "
    rows = draw_curve(values, max(1, width - len(label) - max(map(len, scale)) - 1), height)
    drawn = zip([label, *[" " * len(label)] * (height - 1)], rows, scale, strict=True)
    return [
        first,
        *(
            unwrapped_line((name, "dim"), (row, "cyan"), (f" {text}", "dim"))
            for name, row, text in drawn
        ),
    ]


# -- data quality


def quality_line(report: Report, width: int) -> Text:
    """Return a line on lost data and overhead."""
    quality = report["quality"]
    count = len(quality["notes"])
    parts = [
        f"  data: {quality['lost']:,} of {quality['records'] + quality['lost']:,} records lost",
        format_coverage(quality["coverage"], any_step=report["steps"]["count"] > 0),
        f"overhead {describe_overhead(quality)}",
        f"{count} note{'s' if count != 1 else ''}" if count else "",
        f"sidecars {format_duration(quality['sidecar_cpu_s'])} of CPU time",
    ]
    return unwrapped_line(
        (join_fitting(parts, width), SEVERITIES[WARNING].terminal if quality["lost"] else "dim")
    )


def note_lines(view: View, width: int) -> list[Text]:
    """Return a line on lost data and overhead, followed by all notes."""
    if view.report is None:
        return []
    texts = (Text(f"  - {sanitize_line(note)}") for note in view.report["quality"]["notes"])
    return [quality_line(view.report, width), *texts]
