"""Verdicts that came, went or changed between two sides of runs. Pure."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Sequence

from torchlens_perf.verdicts.kinds import BAD, WARNING
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.headline import Headline, build_headlines, fact_text

Key = tuple[object, ...]


_MOST = 0.5
# Facts that other runs of the same job may not share, and that do not identify a verdict.
_NOT_SHOWN = ("seen", "together with", "steps")


@dataclasses.dataclass(frozen=True)
class VerdictChange:
    """A verdict on a current problem that many more runs of one side have than of the other."""

    what: str
    """"new", "gone" or "changed"."""
    status: str
    """A status in capitals, such as "SLOW RANK"."""
    text: str
    """Status and facts of the verdict; of both verdicts if it changed."""
    before: int
    """Number of runs before that have the verdict; of the former verdict if it changed."""
    after: int
    """Number of runs after that have the verdict; of the present verdict if it changed."""
    is_certain: bool
    """True if the verdict was tested against noise in its run, or if it stopped the run."""


def find_verdict_changes(before: Sequence[Report], after: Sequence[Report]) -> list[VerdictChange]:
    """Return the verdicts that came, went or changed, those that are certain first.

    A verdict is the same in two runs if status, ranks and part of the step are. It came or went if
    the shares of the runs that have it differ by more than half of the runs.
    """
    runs_before = [_list_problems(report) for report in before]
    runs_after = [_list_problems(report) for report in after]
    shown: ChainMap[Key, Headline] = ChainMap(*runs_after, *runs_before)
    found = []
    for key, head in shown.items():
        had = sum(key in run for run in runs_before)
        have = sum(key in run for run in runs_after)
        more = have / len(after) - had / len(before)
        if abs(more) > _MOST:
            what = "new" if more > 0 else "gone"
            is_certain = head.severity == BAD
            found.append(VerdictChange(what, head.status, _describe(head), had, have, is_certain))
    for status in {each.status for each in found}:
        rows = sorted((each for each in found if each.status == status), key=lambda each: each.what)
        # Of several verdicts, it is not known which one became which.
        if [each.what for each in rows] == ["gone", "new"]:
            found = [each for each in found if each.status != status]
            text = f"{rows[0].text} became {rows[1].text}"
            found.append(
                dataclasses.replace(rows[1], what="changed", text=text, before=rows[0].before)
            )
    return sorted(found, key=lambda each: not each.is_certain)


def _list_problems(report: Report) -> dict[Key, Headline]:
    """Return the headlines of the current problems of a run, by what identifies them."""
    pairs = zip(report["verdicts"], build_headlines(report), strict=True)
    return {
        (head.status, row.kind, row.ranks, row.phase): head
        for row, head in pairs
        if head.severity in (BAD, WARNING) and not head.is_over
    }


def _describe(head: Headline) -> str:
    facts = [fact_text(*fact) for fact in head.facts if fact[0] not in _NOT_SHOWN]
    cost = f"costs {head.short_cost}" if head.short_cost else ""
    return f"{head.status} {', '.join(filter(None, (*facts, cost)))}".rstrip()
