"""The verdicts: a card each, the most important first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.page.pictures.markup import Element, tag
from torchlens_perf.page.sections.section import section

if TYPE_CHECKING:
    from torchlens_perf.analysis.words.report import VerdictRow
    from torchlens_perf.page.contents import Contents, HeldVerdict

_BAD = ("hang", "out_of_memory", "straggler")
_GOOD = ("none",)


def verdicts(contents: Contents) -> Element:
    cards = [
        _card(index, verdict, held)
        for index, (verdict, held) in enumerate(zip(contents["report"]["verdicts"], contents["held"], strict=True))
    ]
    return section("verdicts", "Verdicts", cards)


def _card(index: int, verdict: VerdictRow, held: HeldVerdict | None) -> Element:
    head, _, action = verdict["text"].partition(" Next: ")
    look = "bad" if verdict["kind"] in _BAD else "good" if verdict["kind"] in _GOOD else "plain"
    return tag(
        "article",
        tag("p", head, class_="finding"),
        tag("p", tag("b", "Next: "), action, class_="action") if action else None,
        class_=f"verdict {look}",
        id=f"verdict-{index + 1}",
        data_kind=verdict["kind"],
    )
