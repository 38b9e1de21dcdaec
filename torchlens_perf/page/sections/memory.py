"""Memory: of each rank, over the run; on a device, the allocator's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount, percent
from torchlens_perf.page.pictures.lines import Line, lines_picture
from torchlens_perf.page.pictures.markup import Child, Element, tag
from torchlens_perf.page.sections.ranks import by_prominence, named_ranks
from torchlens_perf.page.sections.section import figure, in_bytes, or_dash, section, table

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, StepMatrices
    from torchlens_perf.verdicts.words.report import Report

_MAX_ROWS, _MAX_LINES = 32, 16


def memory(contents: Contents) -> Element | None:
    report, matrices = contents["report"], contents["steps"]
    if all(rank["memory"]["max_bytes"] is None for rank in report["ranks"]):
        return None
    words = _words(report)
    picture = _picture(report, matrices, words) if matrices is not None else None
    sources = sorted({rank["memory"]["source"] for rank in report["ranks"] if rank["memory"]["source"]})
    caption: Child = [tag("strong", words), f" Measured is the {' or the '.join(sources)}." if sources else None]
    shown = figure("memory", picture, caption) if picture is not None else tag("p", caption)
    return section("memory", "Memory", shown, _table(report), _device_table(report))


def _words(report: Report) -> str:
    known = {rank["rank"]: rank["memory"]["max_bytes"] for rank in report["ranks"] if rank["memory"]["max_bytes"]}
    most, least = max(known, key=lambda rank: known[rank] or 0), min(known, key=lambda rank: known[rank] or 0)
    text = f"Rank {most} uses most, {in_bytes(known[most] or 0)}"
    if len(known) > 1:
        text += f", and rank {least} least, {in_bytes(known[least] or 0)}"
    growing = [rank["rank"] for rank in report["ranks"] if rank["memory"]["growth"] is not None]
    if growing:
        text += f"; memory grows from step to step on rank {', '.join(map(str, growing[:8]))}"
    return f"{text}."


def _picture(report: Report, matrices: StepMatrices, words: str) -> Element | None:
    memory_bytes = matrices["memory_bytes"]
    if memory_bytes is None:
        return None
    firsts = matrices["columns"]["first_steps"]
    together = -(-len(firsts) // len(memory_bytes[0]))
    xs = firsts[::together]
    row_of = {place["rank"]: row for row, place in enumerate(matrices["places"])}
    shown = [rank["rank"] for rank in by_prominence(report) if rank["rank"] in row_of][:_MAX_LINES]
    named = named_ranks(report)
    lines = [
        Line(f"rank {rank}", list(zip(xs, memory_bytes[row_of[rank]], strict=False)), rank in named) for rank in shown
    ]
    return lines_picture("memory-picture", "Memory over the run", lines, lambda y: amount(y, "B"), "step", words)


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
