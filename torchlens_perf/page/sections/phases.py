"""Phases: what a typical step of each rank is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration, percent
from torchlens_perf.page.pictures.phases import WORDS, Bar, part_legend, phases_picture
from torchlens_perf.page.sections.ranks import by_prominence, named_ranks
from torchlens_perf.page.sections.section import details, figure, of_picture, section
from torchlens_perf.page.sections.section import old_table as table
from torchlens_perf.run.records import PARTS
from torchlens_perf.view.markup import Element, tag

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Rank, Report

_MAX_BARS = 24


_HIDDEN = "A device that waits for other ranks does not show what its host does meanwhile."


def phases(contents: Contents) -> Element | None:
    report = contents["report"]
    rows = [rank for rank in by_prominence(report) if rank["typical"] is not None]
    if not rows:
        return None
    shown = rows[:_MAX_BARS]
    made = [_part(report, shown, "host", {rank["rank"]: rank["typical"]["parts"] for rank in shown if rank["typical"]})]
    of_device = {
        rank["rank"]: rank["device"]["parts"]
        for rank in shown
        if rank["device"] is not None and rank["device"]["parts"]
    }
    if of_device:
        made.append(_part(report, shown, "device", of_device))
    rest = f"{len(shown)} of {len(rows)} ranks, those that stand out first." if len(shown) < len(rows) else None
    return section("phases", "Phases", made, tag("p", rest, class_="note") if rest else None)


def _part(report: Report, ranks: list[Rank], clock: str, parts_of: dict[int, dict[str, float]]) -> list[Element]:
    named = named_ranks(report)
    seen = [part for part in PARTS if any(part in parts for parts in parts_of.values())]
    bars = [
        Bar(
            f"rank {rank['rank']}",
            {part: parts_of[rank["rank"]].get(part, 0.0) for part in seen},
            rank["rank"] in named,
        )
        for rank in ranks
        if rank["rank"] in parts_of
    ]
    own = report["steps"]["own_time"]
    hidden = clock == "device" and own is not None and own["is_hidden"]
    words = _words(bars, clock, hidden=hidden)
    picture = phases_picture(bars, words, f"phases-{clock}-picture")
    chart = "phases" if clock == "host" else None
    rows = [
        [bar.label, *(_cell(parts_of[rank["rank"]], part, rank) for part in seen)]
        for bar, rank in zip(bars, (rank for rank in ranks if rank["rank"] in parts_of), strict=True)
    ]
    caption = f"Parts of a typical step, by the {clock}'s clock"
    made = [
        figure(chart, picture, [tag("strong", words), of_picture(part_legend(seen))]),
        details("As a table", table(caption, ["rank", *(WORDS.get(part, part) for part in seen)], rows)),
    ]
    missing = sorted({part for rank in ranks for part in rank["not_measured"]})
    if missing and clock == "host":
        names = ", ".join(WORDS.get(part, part) for part in missing)
        made.append(tag("p", f"Not measured on some ranks, and part of backward there: {names}.", class_="note"))
    return made


def _cell(parts: dict[str, float], part: str, rank: Rank) -> str:
    if part in parts:
        return duration(parts[part])
    return "not measured" if part in rank["not_measured"] else "-"


def _words(bars: list[Bar], clock: str, *, hidden: bool) -> str:
    """The largest part of all bars, and of the first one what is larger than on the others.

    hidden: devices hide what their hosts do, and so cannot tell that.
    """
    total = sum(sum(bar.parts_s.values()) for bar in bars)
    if not total:
        return f"Parts of a typical step by the {clock}'s clock."
    sums = {part: sum(bar.parts_s[part] for bar in bars) for part in bars[0].parts_s}
    largest = max(sums, key=lambda part: sums[part])
    share = percent(sums[largest] / total)
    text = f"By the {clock}'s clock, most of a typical step is {WORDS.get(largest, largest)}: {share}"
    marked = next((bar for bar in bars if bar.marked), None)
    others = [bar for bar in bars if not bar.marked]
    if hidden:
        return f"{text}. {_HIDDEN}"
    if marked is None or not others:
        return f"{text}."
    usual = {part: sum(bar.parts_s[part] for bar in others) / len(others) for part in sums}
    own = [part for part in usual if part != "communication"]
    more = max(own, key=lambda part: marked.parts_s[part] - usual[part], default=None)
    if more is None or marked.parts_s[more] <= usual[more]:
        return f"{text}."
    return (
        f"{text}. {marked.label.capitalize()} takes most longer in {WORDS.get(more, more)}: "
        f"{duration(marked.parts_s[more])} against {duration(usual[more])}, the mean of the others shown."
    )
