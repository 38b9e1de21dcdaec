"""The verdicts: the main one in full, other current ones as a line each, and ended ones behind one
line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchlens_perf.analysis.statistics.quantities import percent
from torchlens_perf.view.headline import overall
from torchlens_perf.view.html import card, details, line, section, table
from torchlens_perf.view.markup import Child, Element, tag
from torchlens_perf.view.tables import signal_table

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import VerdictRow

_MAX_STACKS = 8
# Attributes to leave out of a verdict's details: the card shows the host, and the others are equal
# on all ranks.
_OTHER_PLACES = ("host.name", "torch.elastic.", "slurm.job.", "slurm.step.")


def verdicts(contents: Contents) -> Element:
    found = contents["headlines"]
    rows = contents["report"]["verdicts"]
    first = overall(found)
    now: list[Element] = []
    over: list[Element] = []
    for at, (headline, row) in enumerate(zip(found, rows, strict=True), 1):
        key, more = f"verdict-{at}", _more(f"verdict-{at}", row)
        if headline is first:
            now.insert(0, card(headline, key, *more))
        else:
            (over if headline.is_over else now).append(line(headline, key, *more))
    earlier = details(f"Earlier in this run ({len(over)})", over) if over else None
    return section("verdicts", "Verdict", now, earlier)


def _more(key: str, row: VerdictRow) -> list[Child]:
    evidence: Any = row["evidence"]
    known: Mapping[str, Any] = evidence if isinstance(evidence, dict) else {}
    places = [
        f"{name} {text}"
        for name, text in (row["where"] or {}).items()
        if not name.startswith(_OTHER_PLACES)
    ]
    return [
        tag("p", ", ".join(places), class_="note") if places else None,
        _diagnosis(key, row["rank"], known.get("diagnosis")),
        *_stacks(known.get("stacks") or {}),
    ]


def _diagnosis(key: str, rank: int | None, diagnosis: Mapping[str, Any] | None) -> Element | None:
    """Return the cause of a slow rank, the checked explanations, and the measurements behind
    them.
    """
    if diagnosis is None:
        return None
    causes = [
        tag("li", tag("b", each["text"]), _explains(each["explains"]), f" Next: {each['action']}")
        for each in diagnosis["causes"]
    ]
    checked, missing = (
        ", ".join(diagnosis[key]) or "nothing" for key in ("looked_at", "not_measured")
    )
    signals = diagnosis["signals"]
    return details(
        "Causes and measurements",
        tag("ol", causes) if causes else None,
        tag("p", f"Checked: {checked}. Not measured: {missing}."),
        table(signal_table(f"{key}-signals", rank, signals, diagnosis["others_signals"]))
        if signals
        else None,
    )


def _explains(share: float | None) -> str:
    return "." if share is None else f": explains {percent(share)} of the loss."


def _stacks(stacks: Mapping[str, Any]) -> list[Element]:
    """Return the Python stacks of ranks that hang."""
    found = []
    for rank, stack in list(stacks.items())[:_MAX_STACKS]:
        lines = stack["lines"] or [f"none: {stack['reason']}"]
        text = tag("pre", [[each, tag("br")] for each in lines])
        found.append(details(f"Python stack of rank {rank}, innermost first", text))
    return found
