"""The page header with the program, ranks, times and status of the run, and the key figures."""

from __future__ import annotations

import datetime
from collections import Counter
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import (
    format_duration,
    format_percent,
    format_rounded,
    format_run_duration,
)
from torchlens_perf.page.sections.bars import draw_stacked_bar, draw_swatch
from torchlens_perf.verdicts.words.run_state import describe_ranks, describe_run_state
from torchlens_perf.verdicts.words.startup import describe_startup
from torchlens_perf.view.html import build_status_chip
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.rank_tables import mean_parts, part_name, parts_by_rank
from torchlens_perf.view.specs import Bar
from torchlens_perf.view.step_words import step_count_text
from torchlens_perf.view.theme import PARTS

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Report, Run
    from torchlens_perf.view.headline import Headline

_COMPUTE = ("forward", "recompute", "backward", "optimizer")
_SMALLEST_NAMED = 0.005
"""The legend below the bar lists only parts with at least this share of the step."""


def build_header(report: Report, status: Headline | None) -> Element:
    """Return the page header: program, status, and facts of the run."""
    run = report["run"]
    facts = [
        describe_ranks(run),
        _device_names(report),
        *([f"started {format_minute(run['started'])}"] if run["started"] else []),
        _state_text(run),
        step_count_text(report),
        *([f"attempt {run['attempt']}"] if run["attempt"] else []),
        *([words] if (words := describe_startup(run)) else []),
    ]
    return tag(
        "header",
        tag(
            "h1",
            run["program"] or "run",
            " ",
            build_status_chip(status) if status is not None else None,
        ),
        tag(
            "ul",
            [tag("li", fact) for fact in facts],
            tag("li", tag("small", run["id"])),
            class_="facts",
        ),
    )


def build_key_figures(report: Report, status: Headline | None) -> Element | None:
    """Return tiles with the key figures, and a bar with the parts of the mean step."""
    steps = report["steps"]
    if steps["p50_s"] is None:
        return None
    tiles: list[Element | None] = (
        []
        if status is None or status.cost_share is None
        else [_build_tile(format_percent(status.cost_share), _cost_label(status), status.severity)]
    )
    tiles.append(_build_tile(format_duration(steps["p50_s"]), f"step p50{_p95_text(report)}"))
    if steps["mean_s"]:
        tiles.append(_build_tile(format_rounded(1 / steps["mean_s"]), "steps per second"))
    parts = mean_parts(parts_by_rank(report).values())
    bar = Bar("", {part: parts[part] for part in PARTS if parts.get(part)})
    if bar.total:
        share = sum(parts[part] for part in _COMPUTE) / bar.total
        tiles.append(
            _build_tile(format_percent(share), "of step time in forward, backward and optimizer")
        )
    tiles.append(_build_compared_ranks_tile(report))
    drawn = _build_step_bar(bar, report) if bar.total else None
    return tag("section", tiles, drawn, class_="tiles", id="figures", aria_label="Key figures")


def _cost_label(status: Headline) -> str:
    """Return the label of the cost: "of step time in forward" or "of step time lost"."""
    facts = dict(status.facts)
    place = facts.get("in") or facts.get("bound by")
    return f"of step time in {place}" if place else "of step time lost"


def _p95_text(report: Report) -> str:
    p95_s = report["steps"]["p95_s"]
    return "" if p95_s is None else f", p95 {format_duration(p95_s)}"


def _build_compared_ranks_tile(report: Report) -> Element | None:
    size = report["run"]["world_size"]
    if size == 1 or any(row["kind"] == "not_compared" for row in report["verdicts"]):
        return None
    timed = sum(rank["typical"] is not None for rank in report["ranks"])
    return _build_tile(f"{timed} of {size}", "ranks compared")


def _build_tile(number: str, words: str, severity: str = "") -> Element:
    return tag("p", tag("b", number), " ", words, class_=f"tile {severity}".rstrip())


def _build_step_bar(bar: Bar, report: Report) -> Element:
    legend = [
        tag(
            "li",
            draw_swatch(part),
            f"{part_name(report, part, bar.seconds[part])} ",
            tag("b", format_percent(share)),
        )
        for part, _, share in bar.segments(bar.total)
        if share >= _SMALLEST_NAMED
    ]
    words = (
        f"Where a step's time goes{' (mean of ranks)' if report['run']['world_size'] > 1 else ''}"
    )
    drawn = draw_stacked_bar(bar, bar.total, shares=False, look="shares")
    drawn.set("aria-hidden", "true")
    return tag("div", words, drawn, tag("ul", legend, class_="legend"), class_="tile shares")


def _device_names(report: Report) -> str:
    names = Counter(gpu["name"] for gpu in report["gpus"] if gpu["name"])
    return ", ".join(names) or report["run"]["device"] or "CPU"


def _state_text(run: Run) -> str:
    """Return the state and its time: "ended 23:04, ran 38 s", or "running, last step 12:01:03"."""
    words = describe_run_state(run)
    if run["live"]:
        return (
            f"{words}, last step {_parse_time(run['last_step_at']):%H:%M:%S}"
            if run["last_step_at"]
            else words
        )
    ended = run["ended"] or run["last_step_at"]
    if ended is None:
        return words
    words = f"{words} {_parse_time(ended):%H:%M}"
    if run["started"] is None:
        return words
    return f"{words}, ran {format_run_duration((_parse_time(ended) - _parse_time(run['started'])).total_seconds())}"


def format_minute(text: str) -> str:
    """Return an ISO timestamp in the form "2026-11-26 06:48 UTC"."""
    return f"{_parse_time(text):%Y-%m-%d %H:%M} UTC"


def _parse_time(text: str) -> datetime.datetime:
    """Parse an ISO timestamp as UTC. For an invalid text, return the earliest possible time."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return datetime.datetime.min.replace(tzinfo=datetime.timezone.utc)
    return found.astimezone(datetime.timezone.utc)
