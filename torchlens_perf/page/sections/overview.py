"""The page header with the program, ranks, times and status of the run, and the key figures."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping

from torchlens_perf.analysis.statistics.quantities import (
    format_duration,
    format_duration_or_dash,
    format_percent,
    format_rounded,
    format_run_duration,
)
from torchlens_perf.page.sections.bars import draw_stacked_bar, draw_swatch
from torchlens_perf.verdicts.words.device_pace import COMPUTE
from torchlens_perf.verdicts.words.report import Report, Run
from torchlens_perf.verdicts.words.run_state import describe_ranks, describe_state
from torchlens_perf.verdicts.words.startup import describe_startup
from torchlens_perf.view.headline import Headline
from torchlens_perf.view.html import build_details, build_status_chip
from torchlens_perf.view.markup import Child, Element, tag
from torchlens_perf.view.rank_tables import mean_parts, part_name, parts_by_rank
from torchlens_perf.view.specs import Bar
from torchlens_perf.view.step_words import step_count_text
from torchlens_perf.view.theme import PARTS

_SMALLEST_NAMED = 0.005
"""The legend below the bar lists only parts with at least this share of the step."""
_MAIN_SETTINGS = ("commit", "launcher", "torch")
"""Settings that are always visible. A click shows the others."""


def build_header(report: Report, status: Headline | None) -> Element:
    """Return the page header: program, name, status, facts and settings of the run."""
    run = report["run"]
    facts: list[Child] = [
        describe_ranks(run),
        ", ".join(Counter(gpu["name"] for gpu in report["gpus"] if gpu["name"]))
        or report["run"]["device"]
        or "CPU",
        *([tag("span", "started ", _build_time(run["started"]))] if run["started"] else []),
        _state_text(run),
        step_count_text(report),
        *([f"attempt {run['attempt']}"] if run["attempt"] else []),
        *([words] if (words := describe_startup(run)) else []),
        *_build_settings(run["settings"]),
    ]
    return tag(
        "header",
        tag(
            "h1",
            run["program"] or "run",
            " ",
            tag("small", run["id"]),
            " ",
            build_status_chip(status) if status is not None else None,
        ),
        tag("ul", [tag("li", fact) for fact in facts], class_="facts"),
    )


def _build_settings(settings: Mapping[str, str]) -> list[Child]:
    """Return the main settings, and an element that shows the others after a click."""
    others = [
        tag("li", f"{name} ", tag("b", text))
        for name, text in settings.items()
        if name not in _MAIN_SETTINGS
    ]
    return [
        *(f"{name} {settings[name]}" for name in _MAIN_SETTINGS if name in settings),
        *([build_details("Settings", tag("ul", others, class_="facts"))] if others else []),
    ]


def build_key_figures(report: Report, status: Headline | None) -> Element | None:
    """Return tiles with the key figures, and a bar with the parts of the mean step."""
    if report["steps"]["p50_s"] is None:
        return None
    parts = mean_parts(parts_by_rank(report).values())
    bar = Bar("", {part: parts[part] for part in PARTS if parts.get(part)})
    tiles = [
        tag("p", tag("b", number), " ", words, class_=f"tile {severity}".rstrip())
        for number, words, severity in _choose_figures(report, status, bar)
    ]
    drawn = _build_step_bar(bar, report) if bar.total else None
    return tag("section", tiles, drawn, class_="tiles", id="figures", aria_label="Key figures")


def _choose_figures(
    report: Report, status: Headline | None, bar: Bar
) -> Iterator[tuple[str, str, str]]:
    """Yield number, words and severity of each key figure. bar: the parts of the mean step."""
    steps, size = report["steps"], report["run"]["world_size"]
    if status is not None and status.cost_share is not None:
        facts = dict(status.facts)
        place = facts.get("in") or facts.get("bound by")
        lost = f"of {status.whole} in {place}" if place else f"of {status.whole} lost"
        yield format_percent(status.cost_share), lost, status.severity
    p95 = f", p95 {format_duration(steps['p95_s'])}" if steps["p95_s"] is not None else ""
    yield format_duration_or_dash(steps["p50_s"]), f"step p50{p95}", ""
    if steps["mean_s"]:
        yield format_rounded(1 / steps["mean_s"]), "steps per second", ""
    if bar.total:
        computing = sum(bar.seconds.get(part, 0.0) for part in COMPUTE) / bar.total
        yield format_percent(computing), "of a typical step in forward, backward and optimizer", ""
    if size > 1 and all(row.kind != "not_compared" for row in report["verdicts"]):
        timed = sum(rank["typical"] is not None for rank in report["ranks"])
        yield f"{timed} of {size}", "ranks compared", ""


def _build_step_bar(bar: Bar, report: Report) -> Element:
    legend = [
        tag(
            "li",
            draw_swatch(part),
            f"{PARTS[part].glyph} {part_name(report, part, bar.seconds[part])} ",
            tag("b", format_percent(share)),
        )
        for part, _, share in bar.segments(bar.total)
        if share >= _SMALLEST_NAMED
    ]
    words = (
        f"Where a step's time goes{' (mean of ranks)' if report['run']['world_size'] > 1 else ''}"
    )
    drawn = draw_stacked_bar(bar, bar.total, shares=False, class_="shares", aria_hidden="true")
    return tag("div", words, drawn, tag("ul", legend, class_="legend"), class_="tile shares")


def _state_text(run: Run) -> str:
    """Return the state with its time: "ended 23:04 UTC, rank 3 died, ran 38 s", or "failed,
    last step 23:04:12 UTC, ran 38 s". The end of a run is that of its last step."""
    state, ranks = describe_state(run)
    texts, last, began = [state, ranks], run["last_step_at"], run["started"]
    if last is not None and state == "ended":
        texts[0] += f" {_parse_time(last):%H:%M} UTC"
    elif last is not None:
        texts.append(f"last step {_parse_time(last):%H:%M:%S} UTC")
    if last is not None and began is not None and not run["live"]:
        ran_s = (_parse_time(last) - _parse_time(began)).total_seconds()
        texts.append(f"ran {format_run_duration(ran_s)}")
    return ", ".join(filter(None, texts))


def _build_time(text: str) -> Element:
    """Return an ISO timestamp in UTC. A script adds the time of the reader's time zone."""
    return tag("time", format_minute(text), datetime=text, title=format_minute(text))


def format_minute(text: str) -> str:
    """Return an ISO timestamp in the form "2026-11-26 06:48 UTC"."""
    return f"{_parse_time(text):%Y-%m-%d %H:%M} UTC"


def _parse_time(text: str) -> datetime.datetime:
    """Parse an ISO timestamp as UTC."""
    return datetime.datetime.fromisoformat(text).astimezone(datetime.timezone.utc)
