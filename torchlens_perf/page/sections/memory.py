"""Memory: of each rank, over the run; on a device, the allocator's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount
from torchlens_perf.page.sections.section import tables_of
from torchlens_perf.view.html import figure, section
from torchlens_perf.view.markup import Element, tag

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
    return section("memory", "Memory", shown, tables_of(contents, "memory", "out_of_memory"))


def _words(report: Report) -> str:
    known = {rank["rank"]: rank["memory"]["max_bytes"] for rank in report["ranks"] if rank["memory"]["max_bytes"]}
    most, least = max(known, key=lambda rank: known[rank] or 0), min(known, key=lambda rank: known[rank] or 0)
    text = f"Peak {amount(known[most] or 0, 'B')} on rank {most}"
    if len(known) > 1:
        text += f"; the lowest peak is {amount(known[least] or 0, 'B')} on rank {least}"
    growing = [rank["rank"] for rank in report["ranks"] if rank["memory"]["growth"] is not None]
    if growing:
        text += f"; memory grows from step to step on rank {', '.join(map(str, growing[:8]))}"
    return f"{text}."
