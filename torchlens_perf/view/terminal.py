"""Render a report for a terminal or as plain text, in full or as the short form of rank 0."""

from __future__ import annotations

import datetime
import functools
import io
import itertools
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_coverage,
    format_percent,
    format_run_duration,
    printable,
)
from torchlens_perf.run.captures import TRACE
from torchlens_perf.verdicts.kinds import BAD, GOOD, KINDS, OTHER
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.past import describe_period
from torchlens_perf.verdicts.words.report import Heat, HeatMapRow, Report
from torchlens_perf.verdicts.words.run_state import (
    ENDED,
    RUNNING,
    describe_ranks,
    describe_state,
    join_state,
)
from torchlens_perf.verdicts.words.startup import describe_startup
from torchlens_perf.view.headline import (
    Headline,
    build_headlines,
    choose_headline,
    describe_status,
    fact_text,
)
from torchlens_perf.view.rank_tables import mean_parts, part_name, parts_by_rank, slowest_ranks
from torchlens_perf.view.specs import EMPTY, NOT_MEASURED, Bar, Column, Table, sanitize_line
from torchlens_perf.view.step_words import describe_overhead, describe_step_times, step_count_text
from torchlens_perf.view.tables import build_tables
from torchlens_perf.view.theme import EXCESS_BOUNDS, EXCESS_STYLES, PARTS, SEVERITIES

SHORT_LINES, REPORT_LINES = 34, 40
"""The most lines of the report that rank 0 prints, and of `report` without --all."""
_PLAIN_WIDTH = 118
_LABEL, _OVER = 12, "no action needed: "
_ALSO, _EARLIER, _NOTES, _PROFILES = 2, 4, 20, 2
_MIN_NAME, _STACK_LINES, _MIN_ROWS = 12, 6, 3
_WORD_PARTS = re.compile(r"[^./_:=-]*[./_:=-]+|[^./_:=-]+")
_NOTABLE_SPREAD = 0.1
"""Relative spread of compute times above which the short report lists the ranks even if no
verdict names one.
"""
_HEAT_SHADES, _HEAT_RANKS, _HEAT_COLUMNS = "·░▒▓█", 8, 64
_ASCII = str.maketrans("█▓▒░▚·│…", "#%+-x.|~")


def print_report(report: Report, file: IO[str], run_dir: str, *, whole: bool = False) -> None:
    """Print the report: in colour and in the terminal's width on a terminal, else as plain text.

    whole: True to print all tables; by default, those that fit in REPORT_LINES lines.
    """
    columns, color = _terminal_width_and_color(file)
    render = render_full if whole else functools.partial(render_short, most=REPORT_LINES)
    _write_encodable(render(report, run_dir, columns=columns, color=color), file)


def print_tables(
    head: Headline,
    tables: Sequence[Table],
    notes: Sequence[str],
    file: IO[str],
) -> None:
    """Print a headline, tables and notes in the layout of a report."""

    def lines(width: int) -> Iterator[Text]:
        yield Text("")
        yield from verdict_lines(head, width)
        for table in tables:
            yield from noted_table_lines(table, width, table.first or table.rows)
        yield Text("")
        for note in notes:
            yield from _wrap_field("note", note, width)

    print_lines(lines, file)


def print_lines(lines: Callable[[int], Iterable[Text]], file: IO[str]) -> None:
    """Print lines. lines: a function that returns them for a width in columns."""
    columns, color = _terminal_width_and_color(file)
    _write_encodable(lines_to_text(lines(columns or _PLAIN_WIDTH), color=color), file)


def _terminal_width_and_color(file: IO[str]) -> tuple[int, bool]:
    """Return a terminal's width and whether it shows colours; 0 and False for other files."""
    if not file.isatty():
        return 0, False
    console = Console(file=file)
    return console.width, console.color_system is not None and not console.no_color


def _write_encodable(text: str, file: IO[str]) -> None:
    """Write text, in ASCII if the file's encoding lacks some of its characters."""
    try:
        text.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode("ascii", "replace").decode()
    file.write(text)


def render_full(report: Report, run_dir: str, *, columns: int, color: bool) -> str:
    """Return the full report as text. columns: the terminal's width; 0 without a terminal."""
    return lines_to_text(
        _full_report_lines(report, run_dir, columns or _PLAIN_WIDTH, color=color), color=color
    )


def render_short(
    report: Report,
    run_dir: str,
    *,
    columns: int,
    color: bool,
    page: str = "",
    most: int = SHORT_LINES,
) -> str:
    """Return the short report, by default the one that rank 0 prints at the end of a run.

    page: path of the run's page, if one is written. most: see short_report_lines().
    """
    width = columns or _PLAIN_WIDTH
    return lines_to_text(
        short_report_lines(report, run_dir, width, color=color, page=page, most=most), color=color
    )


def lines_to_text(lines: Iterable[Text], *, color: bool) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=10_000,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
    )
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    return file.getvalue()


def short_report_lines(
    report: Report,
    run_dir: str,
    width: int,
    *,
    color: bool,
    page: str = "",
    most: int = SHORT_LINES,
) -> list[Text]:
    """Return the lines of a short report: verdicts, a typical step, and the tables that fit.

    most: the most lines. With at most SHORT_LINES, the only table is that of ranks that differ.
    """
    found = build_headlines(report, run_dir)
    main = choose_headline(found)
    status = describe_status(found, width - 2 - _LABEL)
    lines = [_title_line(report)]
    lines += [_labelled_line("status", status, "dim", "bold")] if " + " in status else []
    lines.append(Text(""))
    if main is not None:
        row = report["verdicts"][found.index(main)]
        # Lines of code of all ranks say more than the stack of one.
        stacks = [] if any(" in " in place for place in main.places) else stack_lines(row, width)
        lines += [*verdict_lines(main, width), *list(stacks)[:_STACK_LINES]]
    lines += [*_profile_lines(report, run_dir), *_other_verdict_lines(found, main, width), Text("")]
    lines += [*_step_lines(report, width), *bar_lines(report, main, width, color=color)]
    made = {table.key: table for table in build_tables(report)}
    if "out_of_memory" in made:
        lines += [Text(""), *table_lines(made.pop("out_of_memory"), width, 5)]
    command = f"torchlens-perf report {printable(run_dir)} --all"
    end = [Text(""), *_recording_lines(report, width), _labelled_line("full report", command)]
    if page:
        end.append(_labelled_line("web page", printable(page)))
    ranks = next((made.pop(key) for key in made if key in ("device_times", "ranks")), None)
    is_notable = any(each.kind in ("straggler", "imbalance") for each in found)
    shown = [] if most <= SHORT_LINES else [*made.values()]
    if ranks is not None and ranks.rows > 1 and (shown or is_notable or _is_spread_notable(ranks)):
        shown.insert(0, ranks)
    for table in shown:
        # A table has 4 other lines: an empty line, the title, the headings, and a line on hidden
        # rows.
        room = most - len(lines) - len(end) - len([*_wrap_text(table.note, width, 2)]) - 4
        block = [*noted_table_lines(table, width, min(table.first or table.rows, max(0, room)))]
        if room >= min(_MIN_ROWS, table.rows) and len(lines) + len(block) + len(end) <= most:
            lines += block
    return [*lines, *end]


def _other_verdict_lines(
    found: Sequence[Headline], main: Headline | None, width: int
) -> Iterator[Text]:
    """Yield lines of the short report on all verdicts but the main one."""
    now = [each for each in found if not each.is_over and each is not main]
    if main is not None and main.severity == GOOD:
        # The bar of the step already shows the numbers of this verdict.
        now = [each for each in now if each.kind != "compute_bound" or each.action]
    for each in now[:_ALSO]:
        yield from headline_lines(each, width)
        yield from _detail_lines(each, width)
    # What is also true now needs no line on an earlier part of the run.
    current = {(KINDS.get(each.kind, OTHER).name, each.ranks) for each in found if not each.is_over}
    over = [
        each
        for each in found
        if each.is_over and (KINDS.get(each.kind, OTHER).name, each.ranks) not in current
    ]
    more = f", and {len(over) - 1} more" * (len(over) > 1)
    for each in over[:1]:
        yield from headline_lines(each, width, "earlier", more)


def _detail_lines(head: Headline, width: int) -> Iterator[Text]:
    """Yield a few lines on the evidence and the action of a secondary verdict."""
    room = 2 * (width - 2 - _LABEL) - _MIN_NAME
    evidence, cost = (head.first_sentence, "") if _is_located(head) else ("", head.cost)
    for label, text in (("cost", cost), ("evidence", evidence), ("next", head.action)):
        if text:
            yield from _wrap_field(label, textwrap.shorten(text, room, placeholder=" …"), width)


def _is_located(head: Headline) -> bool:
    """Return True if headline_line() shows the place of a verdict instead of its sentence."""
    return not {"rank", "ranks", "in", "bound by"}.isdisjoint(dict(head.facts))


def _full_report_lines(report: Report, run_dir: str, width: int, *, color: bool) -> Iterator[Text]:
    found = build_headlines(report, run_dir)
    started, over = report["run"]["started"], []
    yield _title_line(report)
    for each, row in zip(found, report["verdicts"], strict=True):
        if each.is_over:
            held = describe_period(row.held, started)
            over.append(f"{each.sentence} {f'Seen {held}' if held else ''}")
        else:
            yield Text("")
            yield from held_verdict_lines(each, row, report, width)
    if over:
        yield Text("")
    yield from _wrap_first("earlier", over, _EARLIER, "more", width)
    yield Text("")
    yield from _step_lines(report, width)
    start = describe_startup(report["run"])
    if start:
        yield from _wrap_field("start", start, width)
    yield from bar_lines(report, choose_headline(found), width, color=color)
    yield from _heat_map_lines(report["heat"], width)
    for table in build_tables(report):
        yield from noted_table_lines(table, width, table.first or table.rows)
    yield Text("")
    yield _labelled_line("columns", "are explained in docs/guides/read-the-report.md")
    yield from _recording_lines(report, width)
    yield from _wrap_first("note", report["quality"]["notes"], _NOTES, "more notes", width)
    yield _labelled_line("directory", printable(run_dir))


def _wrap_first(
    label: str, texts: Sequence[str], most: int, rest: str, width: int
) -> Iterator[Text]:
    """Yield the first texts with a label each, and a line on the number of other texts."""
    for text in texts[:most]:
        yield from _wrap_field(label, text, width)
    if len(texts) > most:
        yield from _wrap_field("", f"{len(texts) - most} {rest}: --json", width)


def noted_table_lines(table: Table, width: int, rows: int) -> Iterator[Text]:
    """Yield an empty line, the first rows of a table, and its note."""
    yield Text("")
    yield from table_lines(table, width, rows)
    yield from _wrap_text(table.note, width, 2, "dim")


def _title_line(report: Report) -> Text:
    """Return the title line with the program, ranks, steps and state of the run."""
    run, lasted_s, after, within = report["run"], _run_duration_s(report), "", ""
    state, ranks = describe_state(run)
    if lasted_s is not None and state in (ENDED, RUNNING):
        after = f" {'for' if run['live'] else 'after'} {format_run_duration(lasted_s)}"
    elif lasted_s is not None and not run["live"]:
        # A rank that hangs may fail or die long after its last step.
        within = f" in {format_run_duration(lasted_s)}"
    attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
    program = f"{sanitize_line(run['program'])}  " if run["program"] else ""
    text = (
        f"{program}{describe_ranks(run)}, {step_count_text(report)}{within}{attempt},"
        f" {join_state(f'{state}{after}', ranks)}"
    )
    return Text.assemble(("torchlens_perf  ", "bold"), sanitize_line(text))


def _run_duration_s(report: Report) -> float | None:
    run = report["run"]
    try:
        since, until = map(
            datetime.datetime.fromisoformat,
            (run["started"] or "", run["as_of" if run["live"] else "last_step_at"] or ""),
        )
    except ValueError:
        return None
    return (until - since).total_seconds()


def verdict_lines(head: Headline, width: int, held: str = "") -> list[Text]:
    """Return a verdict as labelled lines: location, cost, evidence, cause and next step.

    held: text on how long the verdict has been true; "" to leave it out.
    """
    style, facts = SEVERITIES[head.severity].terminal, dict(head.facts)
    places = _verdict_location(head)
    seen = f" Seen {facts['seen']}." if "seen" in facts and not held else ""
    fields = [
        ("cost", "" if head.loss else _with_others(head.cost, head)),
        ("evidence", f"{head.sentence}{seen}" if places else ""),
        *itertools.zip_longest(("where",), head.places, fillvalue=""),
        ("lost", head.loss),
        ("cause", head.cause if places else ""),
        ("seen", "" if "at" in facts else held),
        ("next", head.action),
    ]
    if places:
        lines = _wrap_pieces(head.status, places, width, style, "bold")
    else:
        lines = _wrap_field(head.status, head.sentence, width, style)
    for label, text in fields:
        style = "bold" if label in ("cost", "lost") else ""
        lines += _wrap_field(label, text, width, text_style=style) if text else []
    return [*lines, _labelled_line("", head.command)] if head.command else lines


def held_verdict_lines(head: Headline, row: Verdict, report: Report, width: int) -> Iterator[Text]:
    """Yield the lines of a verdict with the time for which it has been true, and its stacks."""
    yield from verdict_lines(head, width, describe_period(row.held, report["run"]["started"]))
    yield from stack_lines(row, width)


def _verdict_location(head: Headline) -> list[str]:
    """Return the rank, phase, modules and steps of a verdict."""
    facts = dict(head.facts)
    ranks = [f"{name} {facts[name]}" for name in ("rank", "ranks") if name in facts]
    at = f"at {facts['at']}" if "at" in facts else ""
    return [each for each in (*ranks, head.place, facts.get("steps", ""), at) if each]


def _with_others(cost: str, head: Headline) -> str:
    """Return the cost with the other ranks that cause it together; "" without a cost."""
    others = dict(head.facts).get("together with")
    return f"{cost}, together with {others}" if others and cost else cost


def headline_lines(head: Headline, width: int, label: str = "", more: str = "") -> list[Text]:
    """Return a secondary verdict: its location and cost, or else its first sentence, or all of it in
    one line.

    label: text to show in place of the status of a verdict that is over. more: text to append.
    """
    places, style = _verdict_location(head), "dim" if label else SEVERITIES[head.severity].terminal
    if label and places and not {"in", "bound by"}.intersection(dict(head.facts)):
        places[0] = f"{head.status} {places[0]}"
    text = head.first_sentence if len(head.sentence) > width - 2 - _LABEL else head.sentence
    if _is_located(head):
        others = (fact_text(*fact) for fact in head.facts if fact[0] == "together with")
        text = ", ".join(filter(None, (*places[:1], head.short_cost, *places[1:], *others)))
    return _wrap_field(label or head.status, f"{_OVER * bool(label)}{text}{more}", width, style)


def stack_lines(row: Verdict, width: int) -> Iterator[Text]:
    for rank, stack in row.evidence.stacks.items():
        lines = stack.lines or [f"none: {stack.reason}"]
        yield from _wrap_field("stack", f"rank {rank}, innermost call first", width)
        for line in lines:
            yield from _wrap_text(line, width, 2 + _LABEL)


def _profile_lines(report: Report, run_dir: str) -> list[Text]:
    """Return lines with the paths of the newest torch.profiler traces."""
    paths = [each["files"][TRACE]["path"] for each in report["captures"] if TRACE in each["files"]]
    return [
        _labelled_line("profile", printable(f"{run_dir}/{path}")) for path in paths[-_PROFILES:]
    ]


def _step_lines(report: Report, width: int) -> list[Text]:
    return (
        _wrap_pieces("step", describe_step_times(report), width) if report["steps"]["count"] else []
    )


def bar_lines(
    report: Report, main: Headline | None, width: int, *, color: bool, each: int = 0
) -> list[Text]:
    """Return the parts of a typical step as bars: of the mean rank, or of the slow rank in `main`.

    each: draw one bar per rank if there are at most this many ranks.
    """
    bars = _choose_bars(report, main, each)
    longest = max((sum(found.values()) for found in bars.values()), default=0.0)
    seen = [
        part
        for part in PARTS
        if any(found.get(part, 0.0) > 0.005 * longest for found in bars.values())
    ]
    if not seen:
        return []
    looks = {part: (PARTS[part].glyph, PARTS[part].color.terminal) for part in seen}
    room, lines = max(10, width - 2 - _LABEL), []
    for label, found in bars.items():
        line, filled = _labelled_line(label, ""), 0
        shown = Bar(label, {part: found.get(part, 0.0) for part in seen})
        for part, begin, length in shown.segments(longest):
            shade, style = looks[part]
            cells = max(0, round(room * (begin + length)) - filled)
            filled += cells
            line.append(shade * cells, style=style)
        lines.append(line)
    mean = bars.get("time")
    names = [
        PARTS[part].name
        if mean is None
        else f"{part_name(report, part, mean.get(part, 0.0))} {format_percent(mean.get(part, 0.0) / longest)}"
        for part in seen
    ]
    legend = [
        Text.assemble(looks[part], f" {printable(name)}")
        for part, name in zip(seen, names, strict=True)
    ]
    return lines + [_labelled_line("", "").append_text(row) for row in _join(legend, room, "   ")]


def _choose_bars(report: Report, main: Headline | None, each: int) -> dict[str, dict[str, float]]:
    """Return label and parts of the bars of bar_lines(). The bar of the mean rank is `time`."""
    parts = parts_by_rank(report)
    slow = next((rank for rank in slowest_ranks(report) if rank in parts), None)
    others = [rank for rank in parts if rank != slow]
    if 1 < len(parts) <= each:
        order = sorted(parts, key=lambda rank: (rank != slow, rank))
        return {f"rank {rank}": parts[rank] for rank in order}
    if main is None or main.kind != "straggler" or slow is None or not others:
        return {"time": mean_parts(parts.values())}
    rest = "other ranks" if len(others) > 1 else f"rank {others[0]}"
    return {f"rank {slow}": parts[slow], rest: mean_parts([parts[rank] for rank in others])}


def _is_spread_notable(table: Table) -> bool:
    """Return True if the compute times of the ranks differ by more than _NOTABLE_SPREAD."""
    values = [
        value
        for column in table.columns
        if column.title == table.ranged
        for value in column.values
        if isinstance(value, float)
    ]
    return len(values) > 1 and max(values) - min(values) > _NOTABLE_SPREAD * statistics.median(
        values
    )


def _recording_lines(report: Report, width: int) -> list[Text]:
    """Return lines on the completeness and the overhead of the recording."""
    quality, any_step = report["quality"], report["steps"]["count"] > 0
    count = len(quality["notes"])
    notes = f"; {format_count(count, 'note')}" if count else ""
    text = (
        f"{quality['records']:,} records, {quality['lost']:,} lost,"
        f" {format_coverage(quality['coverage'], any_step=any_step)}; overhead"
        f" {describe_overhead(quality)}{notes}"
    )
    if quality["lost"] or quality["too_deep"] or (any_step and quality["coverage"] < 1):
        return _wrap_field("data lost", text, width, "bold yellow")
    return _wrap_field("recording", text, width)


def table_lines(table: Table, width: int, rows: int) -> list[Text]:
    """Return the first rows of a table as lines, with as many columns as fit.

    If all durations have the same unit, the title shows it instead of the headings.
    """
    shown = table.first_rows(rows)
    units = {column.unit for column in shown.columns if column.unit}
    unit = units.pop() if len(units) == 1 else ""
    columns = [(column.title if unit else column.heading, column) for column in shown.columns]
    while any(column.optional for _, column in columns) and width < sum(
        2
        + min(
            max(map(cell_len, (heading, *column.texts()))),
            _MIN_NAME if column.wraps and column.is_text else width,
        )
        for heading, column in columns
    ):
        columns.remove(max(columns, key=lambda each: each[1].optional))
    cells = [[heading, *column.texts()] for heading, column in columns]
    widths = [max(map(cell_len, texts)) for texts in cells]
    names = [at for at, (_, column) in enumerate(columns) if column.is_text]
    while (
        names
        and sum(widths) + 2 * len(widths) > width
        and max(widths[at] for at in names) > _MIN_NAME
    ):
        widths[max(names, key=lambda at: widths[at])] -= 1
    lines = [Text(f"  {sanitize_line(table.title)}{f', {unit}' if unit else ''}", style="bold")]
    for row in range(shown.rows + 1):
        folded = [
            _fold(sanitize_line(texts[row]), room)
            for texts, room in zip(cells, widths, strict=True)
        ]
        style = SEVERITIES[BAD].terminal if row - 1 in shown.slow else "" if row else "dim"
        lines += [
            _row_line(texts, columns, widths, style)
            for texts in itertools.zip_longest(*folded, fillvalue="")
        ]
    left = (len(table.columns) - len(columns)) * bool(table.hint)
    hidden = table.describe_hidden_rows(shown.rows), format_count(left, "more column") * bool(left)
    rest = ", ".join(filter(None, hidden))
    return [*lines, Text(f"  {rest}{table.hint}", style="dim")] if rest else lines


def _fold(text: str, width: int) -> list[str]:
    """Return text as lines, which end between words, or after punctuation in a long word."""
    if cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        gap = " " if lines[-1] else ""
        parts = [word] if cell_len(word) <= width else _WORD_PARTS.findall(word)
        for part in parts:
            if cell_len(lines[-1] + gap + part) <= width:
                lines[-1] += gap + part
            else:
                lines += chop_cells(part, width)
            gap = ""
    return lines if lines[0] else lines[1:]


def _row_line(
    texts: Sequence[str], columns: Sequence[tuple[str, Column]], widths: Sequence[int], style: str
) -> Text:
    line = Text()
    for text, (_, column), width in zip(texts, columns, widths, strict=True):
        gap = " " * (width - cell_len(text))
        shown = style or ("dim" if text in (EMPTY, NOT_MEASURED) else "")
        line.append(f"  {text}{gap}" if column.is_text else f"  {gap}{text}", style=shown)
    return line


def _heat_map_lines(heat: Heat | None, width: int) -> Iterator[Text]:
    """Yield a line of excess compute time over the run for slow ranks and those with most
    excess.
    """
    if heat is None or len(heat["first_steps"]) < 4:
        return
    shown = sorted(
        heat["ranks"], key=lambda rank: (not rank["slow"], -_mean_excess(rank), rank["rank"])
    )[:_HEAT_RANKS]
    if not any(rank["slow"] or _mean_excess(rank) >= EXCESS_BOUNDS[0] for rank in shown):
        return
    first = heat["first_steps"]
    together = -(-len(first) // max(4, min(_HEAT_COLUMNS, width - _LABEL - 4)))
    yield Text("")
    yield Text(
        "  Extra compute time of each rank over the run, as a share of the other ranks' median",
        style="bold",
    )
    for rank in shown:
        line = _labelled_line(f"rank {rank['rank']}", "│")
        for at in range(0, len(first), together):
            values = [value for value in rank["excess"][at : at + together] if value is not None]
            if values:
                level = sum(statistics.fmean(values) >= bound for bound in EXCESS_BOUNDS)
                line.append(_HEAT_SHADES[level], style=EXCESS_STYLES[level])
            else:
                line.append(" ")
        yield line.append("│")
    begin, end = str(first[0]), str(first[-1])
    cells = -(-len(first) // together)
    yield _labelled_line("step", f" {begin}{end.rjust(max(len(end) + 1, cells - len(begin)))}")
    scale = "   ".join(
        f"{shade} {bound:.0%}" for shade, bound in zip(_HEAT_SHADES[1:], EXCESS_BOUNDS, strict=True)
    )
    left = len(heat["ranks"]) - len(shown)
    yield _labelled_line("", f" {scale} and more{f'   ({left} more ranks)' if left else ''}")


def _mean_excess(rank: HeatMapRow) -> float:
    return statistics.fmean([value for value in rank["excess"] if value is not None] or [0.0])


def _labelled_line(label: str, text: str, style: str = "dim", text_style: str = "") -> Text:
    gap = "  " if len(label) >= _LABEL else ""
    return Text.assemble(
        "  ", (f"{label:<{_LABEL}}{gap}", style), (sanitize_line(text), text_style)
    )


def _wrap_field(
    label: str, text: str, width: int, style: str = "dim", text_style: str = ""
) -> list[Text]:
    """Return a label and its text as lines, wrapped to the width."""
    begin = max(_LABEL, len(label) + 2)
    first, *rest = textwrap.wrap(
        sanitize_line(text), max(20, width - 2 - begin), break_on_hyphens=False
    ) or [""]
    rows = textwrap.wrap(" ".join(rest), max(20, width - 2 - _LABEL))
    return [
        _labelled_line(label, first, style, text_style),
        *(_labelled_line("", row, "", text_style) for row in rows),
    ]


def _wrap_pieces(
    label: str, pieces: Sequence[str], width: int, style: str = "dim", text_style: str = ""
) -> list[Text]:
    """Return a label and short texts as lines. No text is broken across lines."""
    room = width - 2 - max(_LABEL, len(label) + 2)
    gap = "   " if len("   ".join(pieces)) <= room else "  "
    lines = _join((Text(sanitize_line(piece)) for piece in pieces), room, gap)
    return [
        _labelled_line("" if at else label, line.plain, style, text_style)
        for at, line in enumerate(lines)
    ]


def _join(pieces: Iterable[Text], room: int, gap: str) -> list[Text]:
    """Return the pieces as lines of at most `room` characters, if no piece is longer."""
    lines = list[Text]()
    for piece in pieces:
        if lines and len(lines[-1]) + len(gap) + len(piece) <= room:
            lines[-1].append(gap).append_text(piece)
        else:
            lines.append(piece)
    return lines


def _wrap_text(text: str, width: int, indent: int, style: str = "") -> Iterator[Text]:
    for line in textwrap.wrap(sanitize_line(text), max(20, width - indent)):
        yield Text(" " * indent + line, style=style)
