"""The table of ranks: who is slow, who waits, and how often each came last; those that stand out first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torchlens_perf.analysis.statistics.quantities import duration, duration_or_dash, percent
from torchlens_perf.page.pictures.markup import Child, Element, name, tag
from torchlens_perf.page.sections.section import in_bytes, or_dash, section, table
from torchlens_perf.verdicts.words.order import ranks_of

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Rank, Report

MAX_ROWS = 64
_NAMED = ("straggler", "hang", "out_of_memory", "hang_ended", "straggler_transient", "straggler_ended")


def named_ranks(report: Report) -> list[int]:
    """Ranks that verdicts are about, in the order of the verdicts."""
    found: list[int] = []
    for verdict in report["verdicts"]:
        if verdict["kind"] in _NAMED and verdict["rank"] is not None:
            found += [verdict["rank"], *ranks_of(verdict)]
    return list(dict.fromkeys(found))


def by_prominence(report: Report) -> list[Rank]:
    """All ranks of the report: named ones first, then by the time that they do not wait, most first."""
    order = {rank: place for place, rank in enumerate(named_ranks(report))}
    return sorted(report["ranks"], key=lambda rank: (order.get(rank["rank"], len(order)), -own_s(rank), rank["rank"]))


def own_s(rank: Rank) -> float:
    """Work where it is known, else own time, of a typical step; 0 where there is none."""
    typical = rank["typical"]
    if typical is None:
        return 0.0
    return typical["work_s"] if typical["work_s"] is not None else typical["own_s"]


def came_last(report: Report) -> dict[int, tuple[int, int]]:
    """By rank, how often it came last, and in how many operations: of those whose ranks were all compared."""
    found: dict[int, tuple[int, int]] = {}
    for rank in report["ranks"]:
        known: Any = cast("Mapping[str, Any]", rank).get("arrived_last")
        if known is not None:
            found[rank["rank"]] = known["count"], known["joined"]
    if found:
        return found
    for row in report["collectives"]:
        if row["joined_whole"] and row["joined"] and row["wait_s"]["mean_s"] is not None:
            for key, of in row["by_rank"].items():
                last, joined = found.get(int(key), (0, 0))
                found[int(key)] = (last + int(of["last"]), joined + row["joined"])
    return found


def ranks(contents: Contents) -> Element | None:
    report = contents["report"]
    if not report["ranks"] or not report["steps"]["count"]:
        return None
    rows, last, named = by_prominence(report)[:MAX_ROWS], came_last(report), named_ranks(report)
    has_work = any(rank["typical"] is not None and rank["typical"]["work_s"] is not None for rank in report["ranks"])
    by_device = any(rank["device"] is not None and rank["device"]["work_s"] is not None for rank in report["ranks"])
    whose = ", by the host, which issues it" if report["run"]["device"] is not None else ""
    headers: list[Child] = ["rank", "host", "typical step", "own", *(["work"] if has_work else []), "wait"]
    headers += ["share waited", "came last", *(["device work"] if by_device else []), "memory", "steps", "state"]
    body: list[Sequence[Child]] = []
    for rank in rows:
        typical = rank["typical"]
        wait_s = None if typical is None else typical["parts"].get("communication")
        share = None if wait_s is None or typical is None or not typical["s"] else wait_s / typical["s"]
        device = rank["device"]
        body.append(
            [
                str(rank["rank"]),
                name(rank["host"], 32),
                duration_or_dash(None if typical is None else typical["s"]),
                duration_or_dash(None if typical is None else typical["own_s"]),
                *([duration_or_dash(None if typical is None else typical["work_s"])] if has_work else []),
                duration(wait_s) if wait_s is not None else _missing(rank, "communication"),
                or_dash(share, percent),
                or_dash(last.get(rank["rank"]), _share_last),
                *(
                    [duration_or_dash(device["work_s"]["p50_s"] if device and device["work_s"] else None)]
                    if by_device
                    else []
                ),
                or_dash(rank["memory"]["max_bytes"], in_bytes),
                str(rank["steps"]),
                rank["state"],
            ]
        )
    marked = [at for at, rank in enumerate(rows) if rank["rank"] in named]
    caption = f"Typical step of each rank{whose}; ranks that verdicts name come first, then those with most own time"
    notes = ["own: without waiting", *(["work: without lack of a CPU too"] if has_work else [])]
    notes.append("came last: of the collectives that all of a group's ranks were compared in, how many waited for it")
    if len(rows) < report["run"]["world_size"]:
        notes.append(f"{len(rows)} of {report['run']['world_size']} ranks")
    shown = table(caption, headers, body, texts=(1, len(headers) - 1), marked=marked)
    return section(
        "ranks", "Ranks", tag("p", _words(report, last)), shown, tag("p", "; ".join(notes) + ".", class_="note")
    )


def _words(report: Report, last: dict[int, tuple[int, int]]) -> str:
    """What the table shows, in one or two sentences."""
    waits = {
        rank["rank"]: rank["typical"]["parts"]["communication"]
        for rank in report["ranks"]
        if rank["typical"] is not None and "communication" in rank["typical"]["parts"]
    }
    words = []
    if len(waits) > 1:
        least, most = min(waits, key=lambda rank: waits[rank]), max(waits, key=lambda rank: waits[rank])
        words.append(
            f"In a typical step rank {least} waits least for others ({duration(waits[least])}) and rank {most} most "
            f"({duration(waits[most])})."
        )
    often = max(last, key=lambda rank: last[rank][0] / max(1, last[rank][1]), default=None)
    if often is not None and last[often][0]:
        words.append(f"Rank {often} came last most often: in {_share_last(last[often])} of its compared collectives.")
    return " ".join(words)


def _share_last(counts: tuple[int, int]) -> str:
    last, joined = counts
    return f"{last} of {joined} ({percent(last / joined)})" if joined else "-"


def _missing(rank: Rank, part: str) -> str:
    return "not measured" if part in rank["not_measured"] else "-"
