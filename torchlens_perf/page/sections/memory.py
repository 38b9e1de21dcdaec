"""Memory: of each rank, over the run; on a device, the allocator's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount, percent
from torchlens_perf.page.markup import Element, tag
from torchlens_perf.page.sections.ranks import by_prominence
from torchlens_perf.page.sections.section import figure, section, table
from torchlens_perf.report.tables import in_bytes, or_dash

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Report

_MAX_ROWS = 32


def memory(contents: Contents) -> Element | None:
    report, matrices = contents["report"], contents["steps"]
    if all(rank["memory"]["max_bytes"] is None for rank in report["ranks"]):
        return None
    words = _words(report)
    sources = sorted({rank["memory"]["source"] for rank in report["ranks"] if rank["memory"]["source"]})
    title = f"Memory over the run ({', '.join(sources)})" if sources else "Memory over the run"
    drawn = matrices is not None and matrices["memory_bytes"] is not None
    shown = figure("memory", title, words) if drawn else tag("p", words)
    return section("memory", "Memory", shown, _table(report), _device_table(report))


def _words(report: Report) -> str:
    known = {rank["rank"]: rank["memory"]["max_bytes"] for rank in report["ranks"] if rank["memory"]["max_bytes"]}
    most, least = max(known, key=lambda rank: known[rank] or 0), min(known, key=lambda rank: known[rank] or 0)
    text = f"Peak {in_bytes(known[most] or 0)} on rank {most}"
    if len(known) > 1:
        text += f"; the lowest peak is {in_bytes(known[least] or 0)} on rank {least}"
    growing = [rank["rank"] for rank in report["ranks"] if rank["memory"]["growth"] is not None]
    if growing:
        text += f"; memory grows from step to step on rank {', '.join(map(str, growing[:8]))}"
    return f"{text}."


def _table(report: Report) -> Element:
    rows = [rank for rank in by_prominence(report) if rank["memory"]["max_bytes"] is not None][:_MAX_ROWS]
    body = []
    for rank in rows:
        growth = rank["memory"]["growth"]
        body.append(
            [
                str(rank["rank"]),
                or_dash(rank["memory"]["last_bytes"], in_bytes),
                or_dash(rank["memory"]["max_bytes"], in_bytes),
                f"{amount(growth['bytes_per_step'], 'B')} a step, full at step {growth['full_at_step']}"
                if growth
                else "-",
            ]
        )
    which = f", {len(body)} of {len(report['ranks'])} ranks" if len(body) < len(report["ranks"]) else ""
    return table(f"Memory of each rank{which}", ["rank", "last", "most", "grows"], body, texts=(3,))


def _device_table(report: Report) -> Element | None:
    rows = [rank for rank in by_prominence(report) if rank["memory"]["device"] is not None][:_MAX_ROWS]
    if not rows:
        return None
    body = []
    for rank in rows:
        of = rank["memory"]["device"]
        assert of is not None
        body.append(
            [
                str(rank["rank"]),
                or_dash(of["allocated_bytes"], in_bytes),
                or_dash(of["peak_allocated_bytes"], in_bytes),
                or_dash(of["reserved_bytes"], in_bytes),
                or_dash(of["peak_reserved_bytes"], in_bytes),
                or_dash(of["limit_bytes"], in_bytes),
                or_dash(of["fragmentation"], percent),
                or_dash(of["alloc_retries"], str),
                or_dash(of["ooms"], str),
            ]
        )
    headers = [
        "rank",
        "allocated",
        "most",
        "reserved",
        "most",
        "limit",
        "cannot be given back",
        "retries",
        "out of memory",
    ]
    return table("The device allocator's newest reading, and the most over the run", headers, body, texts=())
