"""The section on verdicts: the main verdict in full, and each other verdict as one line."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_percent
from torchlens_perf.page.contents import PageContents
from torchlens_perf.verdicts.stragglers.findings import Diagnosis
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.causes import describe_cause
from torchlens_perf.view.headline import choose_headline
from torchlens_perf.view.html import (
    build_details,
    build_section,
    build_table,
    build_verdict_card,
    build_verdict_line,
)
from torchlens_perf.view.markup import Child, Element, tag
from torchlens_perf.view.tables import build_signal_table

_MAX_STACKS = 8
# The details leave out the host, which the card shows, and attributes that are equal on all ranks.
_OTHER_PLACES = ("host.name", "torch.elastic.", "slurm.job.", "slurm.step.")


def build_verdicts_section(contents: PageContents) -> Element:
    found = contents["headlines"]
    rows = contents["report"]["verdicts"]
    first = choose_headline(found)
    now: list[Element] = []
    over: list[Element] = []
    for at, (headline, row) in enumerate(zip(found, rows, strict=True), 1):
        key, more = f"verdict-{at}", _build_verdict_details(f"verdict-{at}", row)
        if headline is first:
            now.insert(0, build_verdict_card(headline, key, *more))
        else:
            (over if headline.is_over else now).append(build_verdict_line(headline, key, *more))
    earlier = build_details(f"Earlier in this run ({len(over)})", over) if over else None
    return build_section("verdicts", "Verdict", now, earlier)


def _build_verdict_details(key: str, row: Verdict) -> list[Child]:
    places = [
        f"{name} {text}"
        for name, text in (row.where or {}).items()
        if not name.startswith(_OTHER_PLACES)
    ]
    return [
        tag("p", ", ".join(places), class_="note") if places else None,
        _build_diagnosis(key, row.rank, row.diagnosis),
        *_build_stacks(row.evidence),
    ]


def _build_diagnosis(key: str, rank: int | None, diagnosis: Diagnosis | None) -> Element | None:
    """Return an element with the causes of a slow rank and the measurements behind them."""
    if diagnosis is None:
        return None
    found = [(each, describe_cause(each, rank)) for each in diagnosis.causes]
    causes = [
        tag(
            "li",
            tag("b", text),
            "."
            if each.explains is None
            else f": explains {format_percent(each.explains)} of the loss.",
            f" Next: {action}",
        )
        for each, (text, action) in found
    ]
    checked = ", ".join(diagnosis.looked_at) or "nothing"
    missing = ", ".join(diagnosis.not_measured) or "nothing"
    signals = diagnosis.signals
    return build_details(
        "Causes and measurements",
        tag("ol", causes) if causes else None,
        tag("p", f"Checked: {checked}. Not measured: {missing}."),
        build_table(build_signal_table(f"{key}-signals", rank, signals, diagnosis.others_signals))
        if signals
        else None,
    )


def _build_stacks(evidence: Evidence) -> list[Element]:
    """Return collapsed elements with the Python stacks of hanging ranks, and with NCCL's status."""
    texts = {
        f"Python stack of rank {rank}, innermost first": stack.lines or [f"none: {stack.reason}"]
        for rank, stack in list(evidence.stacks.items())[:_MAX_STACKS]
    }
    if evidence.nccl_status:
        texts["Status of NCCL"] = evidence.nccl_status.splitlines()
    return [
        build_details(title, tag("pre", [[each, tag("br")] for each in lines]))
        for title, lines in texts.items()
    ]
