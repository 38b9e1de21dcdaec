"""The verdicts: a card each, the most important first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchlens_perf.analysis.statistics.quantities import duration, percent
from torchlens_perf.page.markup import Element, tag
from torchlens_perf.page.sections.section import details, section
from torchlens_perf.run.verdicts import sentence_and_action

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, HeldVerdict
    from torchlens_perf.verdicts.words.report import VerdictRow

_MAX_STACKS = 8
_BAD = ("hang", "out_of_memory", "straggler")
_GOOD = ("none",)
# Of the host, the sentence has it; the others are the same on all ranks.
_NO_PLACE = ("host.name", "torch.elastic.", "slurm.job.", "slurm.step.")


def verdicts(contents: Contents) -> Element:
    cards = [
        _card(index, verdict, held)
        for index, (verdict, held) in enumerate(zip(contents["report"]["verdicts"], contents["held"], strict=True))
    ]
    return section("verdicts", "Verdicts", cards)


def _card(index: int, verdict: VerdictRow, held: HeldVerdict | None) -> Element:
    head, action = sentence_and_action(verdict["text"])
    look = "bad" if verdict["kind"] in _BAD else "good" if verdict["kind"] in _GOOD else "plain"
    return tag(
        "article",
        tag("p", head, class_="finding"),
        tag("p", tag("b", "Next: "), action, class_="action") if action else None,
        _facts(verdict, held),
        _stacks(verdict["evidence"]),
        class_=f"verdict {look}",
        id=f"verdict-{index + 1}",
        data_kind=verdict["kind"],
    )


def _facts(verdict: VerdictRow, held: HeldVerdict | None) -> Element | None:
    """What it costs, since when, and in how many windows it held."""
    rows: list[tuple[str, str]] = []
    if verdict["cost_s_per_step"] and verdict["cost_share"] is not None:
        rows.append(("cost", f"{duration(verdict['cost_s_per_step'])} a step, {percent(verdict['cost_share'])}"))
    if held is not None:
        if held["since_s"] is not None:
            until = "still" if held["until_s"] is None else f"until {_clock(held['until_s'])}"
            since_s = held["since_s"]
            began = f"{_clock(since_s)} after the first step" if since_s > 0 else "the first step"
            rows.append(("held", f"from {began}, {until}"))
        if held["windows_held"] is not None and held["windows_judged"] is not None:
            rows.append(("in", f"{held['windows_held']} of {held['windows_judged']} windows that were judged"))
    rows += [(key, value) for key, value in (verdict["where"] or {}).items() if not key.startswith(_NO_PLACE)]
    if not rows:
        return None
    return tag("dl", [tag("div", tag("dt", key), tag("dd", value)) for key, value in rows])


def _clock(seconds: float) -> str:
    """As 1:02:03, or 4.5 s for little."""
    if seconds < 100:
        return duration(seconds) if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _stacks(evidence: Any) -> list[Element]:
    """Of ranks that hang."""
    stacks = evidence.get("stacks") if isinstance(evidence, dict) else None
    found = []
    for rank, stack in list((stacks or {}).items())[:_MAX_STACKS]:
        lines = stack["lines"] or [f"none: {stack['reason']}"]
        text = tag("pre", [[line, tag("br")] for line in lines])
        found.append(details(f"Python stack of rank {rank}, innermost first", text))
    return found
