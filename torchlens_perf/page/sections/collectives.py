"""Collectives and links: what communication takes, who waits in it and who comes last, and which links are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount, duration, percent
from torchlens_perf.page.pictures.markup import Child, Element, name, tag
from torchlens_perf.page.pictures.phases import Bar, phases_picture
from torchlens_perf.page.sections.ranks import named_ranks
from torchlens_perf.page.sections.section import details, figure, or_dash, section, table
from torchlens_perf.view.collective_table import collective_table, ranks_words

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Collective, Report

_MAX_ROWS, _MAX_RANKS = 32, 32


def collectives(contents: Contents) -> Element | None:
    report = contents["report"]
    rows = report["collectives"]
    if not rows and not report["links"]:
        return None
    parts: list[Child] = [tag("p", _words(rows))]
    if rows:
        parts += [_table(report), _by_rank(report, rows[0]), _cannot_tell(rows)]
    return section("collectives", "Collectives and links", parts, _slow_links(report), _ports(report))


def _words(rows: list[Collective]) -> str:
    if not rows:
        return "No collective was recorded."
    known = [row for row in rows if row["slowest_rank"] is not None]
    if not known:
        return "Who came last in collectives is not known."
    most = max(known, key=lambda row: row["by_rank"][str(row["slowest_rank"])]["exposed_lag_s"])
    of = most["by_rank"][str(most["slowest_rank"])]
    lag_s = of["exposed_lag_s"] + of["overlapped_lag_s"]
    share = percent(of["last"] / most["joined"])
    return (
        f"In {most['operation']} of ranks {ranks_words(most)}, rank {most['slowest_rank']} came last in {share} of "
        f"{most['joined']} operations, {duration(lag_s)} in all after the rank before it."
    )


def _table(report: Report) -> Element | None:
    shown = collective_table(report)
    if shown is None:
        return None
    headers: list[Child] = [column.heading for column in shown.columns]
    body = list(zip(*(column.texts()[:_MAX_ROWS] for column in shown.columns), strict=True))
    caption = shown.title + (f", {len(body)} of {shown.rows}" if len(body) < shown.rows else "")
    texts = [at for at, column in enumerate(shown.columns) if column.is_text]
    return tag("div", table(caption, headers, body, texts=texts), tag("p", shown.note, class_="note"))


def _by_rank(report: Report, row: Collective) -> Element | None:
    """Of the collective with most bytes, what each rank waited."""
    if not row["by_rank"] or not row["joined"]:
        return None
    named = set(named_ranks(report))
    order = sorted(row["by_rank"], key=lambda rank: (int(rank) not in named, -row["by_rank"][rank]["last"], int(rank)))
    body = [
        [
            rank,
            f"{of['last']:.0f} of {row['joined']} ({percent(of['last'] / row['joined'])})"
            if row["joined_whole"]
            else "not known",
            duration(of["exposed_lag_s"] + of["overlapped_lag_s"]) if row["joined_whole"] else "not known",
            duration(of["exposed_wait_s"]),
            duration(of["overlapped_wait_s"]) if row["asynchronous"] else "-",
        ]
        for rank, of in ((rank, row["by_rank"][rank]) for rank in order[:_MAX_RANKS])
    ]
    headers = ["rank", "came last", "after the rank before, in all", "waited, in all", "issued earlier, in all"]
    which = f", {len(body)} of {len(order)} ranks" if len(body) < len(order) else ""
    caption = f"{row['operation']} of ranks {ranks_words(row)} by rank{which}"
    marked = [at for at, rank in enumerate(order[:_MAX_RANKS]) if int(rank) in named]
    what, label = "waited", "waited, in all"
    if row["asynchronous"]:
        what, label = "waited, or had issued it before the last did,", "waited or issued earlier, in all"
    words = f"How long each rank {what} in {row['operation']} of ranks {ranks_words(row)}, over the run."
    bars = [
        Bar(f"rank {rank}", {"communication": of["exposed_wait_s"] + of["overlapped_wait_s"]}, int(rank) in named)
        for rank, of in ((rank, row["by_rank"][rank]) for rank in order[:_MAX_RANKS])
    ]
    picture = phases_picture(bars, words, "collectives-picture", title="Waiting by rank", label=label)
    return tag(
        "div",
        figure(
            "collectives",
            picture,
            [tag("strong", words), " The one that waits least is the one that the others wait for."],
        ),
        table(caption, headers, body, texts=(), marked=marked),
    )


def _cannot_tell(rows: list[Collective]) -> Element | None:
    texts = dict.fromkeys(f"{row['operation']}: {text}" for row in rows[:_MAX_ROWS] for text in row["cannot_tell"])
    if not texts:
        return None
    return details("What these numbers cannot tell", tag("ul", [tag("li", text) for text in texts]))


def _slow_links(report: Report) -> Element | None:
    links = report["slow_links"]
    rows = links["links"] if isinstance(links, dict) else []
    if not rows:
        return None
    body = [
        [
            "-".join(map(str, each["ranks"])), each["operation"], duration(each["transfer_ns"] / 1e9),
            duration(each["peers_transfer_ns"] / 1e9), str(each["operations"]), duration(each["cost_ns"] / 1e9),
        ]
        for each in rows[:_MAX_ROWS]
    ]  # fmt: skip
    headers = ["ranks", "operation", "transfer", "of its peers", "operations", "cost in all"]
    return table("Slow links, the costliest first", headers, body, texts=(0, 1))


def _ports(report: Report) -> Element | None:
    rows = report["links"]
    if not rows:
        return None
    faulty = sorted(rows, key=lambda row: -sum(row["errors"].values()))[:_MAX_ROWS]
    body: list[list[Child]] = [
        [
            name(row["host"], 32), name(row["port"], 32), row["layer"] or "-",
            or_dash(row["rate_bits"], lambda bits: amount(bits, "bit/s")), str(row["samples"]),
            ", ".join(f"{kind.replace('_', ' ')} {count:.0f}" for kind, count in row["errors"].items()) or "none",
        ]
        for row in faulty
    ]  # fmt: skip
    headers = ["node", "port", "layer", "rate", "samples", "errors during the run"]
    which = f", {len(body)} of {len(rows)}" if len(body) < len(rows) else ""
    return table(f"Network ports, those with most errors first{which}", headers, body, texts=(0, 1, 2, 5))
