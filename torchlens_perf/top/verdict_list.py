"""The run's verdicts as they come and go: which hold, which held, since when and for how long. Pure.

The report says what holds at one look. What it no longer says stays listed here. When something began is taken from the
report, where that has it, or else is when it was first seen.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Any

from torchlens_perf.analysis.words import order
from torchlens_perf.analysis.words.evidence import PastEvidence
from torchlens_perf.analysis.words.hang import HangEvidence

if TYPE_CHECKING:
    from torchlens_perf.analysis.words.report import Report, VerdictRow

MAX_PAST = 64
# What begins and ends. Other verdicts are about the run as a whole: one that gives way to another has not ended.
_COME_AND_GO = ("straggler", "hang", "imbalance", "slow_link", "out_of_memory")
_PAST = ("_ended", "_transient")
_Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One verdict. Times are seconds of UTC."""

    kind: str
    text: str
    """Without the next action."""
    action: str
    """What to do; "" where there is nothing."""
    details: tuple[str, ...] = ()
    """Lines of evidence, such as Python stacks."""
    ranks: tuple[int, ...] = ()
    """Whom it is about; () for the job as a whole."""
    since_step: int | None = None
    began_s: float | None = None
    """None: not known."""
    seen_s: float | None = None
    """When it was first seen here; None: it was there at the first look."""
    ended_s: float | None = None
    holds: bool = True
    order: order.Key = (1, 0.0)
    """Its place among the others, as the report has it."""

    @property
    def comes_and_goes(self) -> bool:
        return self.kind.startswith(_COME_AND_GO)

    @property
    def from_s(self) -> float | None:
        """When it began, as well as that is known."""
        return self.seen_s if self.began_s is None else self.began_s


class VerdictList:
    """One thread."""

    def __init__(self) -> None:
        self._holding: dict[_Key, Entry] = {}
        self._past: dict[_Key, Entry] = {}
        self._looked = False

    def update(self, report: Report, now_s: float) -> None:
        """Takes over what a report says, at that time."""
        attempt = report["run"]["attempt"]
        rows = {_key(row, attempt): _entry(row) for row in report["verdicts"]}
        new_past = [key for key, entry in rows.items() if not entry.holds and key not in self._past]
        before, self._holding = self._holding, {}
        for key, entry in rows.items():
            if entry.holds:
                first = before.pop(key, None) or _taken(before, attempt, entry)
                seen_s = first.seen_s if first is not None else now_s if self._looked else None
                self._holding[key] = dataclasses.replace(entry, seen_s=seen_s)
            else:
                known = self._past.get(key, dataclasses.replace(entry, seen_s=now_s if self._looked else None))
                self._past[key] = _joined(entry, known)
        hangs = any(entry.kind == "hang" for entry in self._holding.values())
        for key, entry in before.items():
            end = next((key for key in new_past if _is_end_of(rows[key], entry)), None)
            if end is not None:  # the report says itself how it ended
                new_past.remove(end)
                self._past[end] = _joined(rows[end], dataclasses.replace(entry, ended_s=now_s))
            elif entry.comes_and_goes and hangs:
                self._holding[key] = entry  # a report on a hang says nothing of what was there before it
            elif entry.comes_and_goes:
                self._past[(*key, now_s)] = dataclasses.replace(
                    entry, holds=False, ended_s=now_s, action="", order=(2, 0.0)
                )
        while len(self._past) > MAX_PAST:
            del self._past[next(iter(self._past))]
        self._looked = True

    def entries(self) -> list[Entry]:
        """Return all entries in the report's order; those that the report no longer has come last, the newest first."""
        past = sorted(self._past.values(), key=_when_it_ended)[::-1]
        return sorted([*self._holding.values(), *past], key=_place)


def _key(row: VerdictRow, attempt: int) -> _Key:
    """The same for a verdict for as long as it holds: its words and numbers change, also the step that it begins at."""
    if row["kind"].endswith(_PAST):
        return attempt, row["kind"], row["rank"], row["since_step"]
    if row["kind"] == "hang":
        return attempt, row["kind"], row["since_step"]  # other ranks may turn out to be the cause
    evidence = row["evidence"]
    if isinstance(evidence, dict) and "kinds" in evidence:
        return attempt, row["kind"], tuple(evidence["kinds"]), evidence["part"]  # several classes of long steps
    return attempt, row["kind"], _ranks(row)


def _entry(row: VerdictRow) -> Entry:
    text, _, action = row["text"].partition(" Next: ")
    evidence = row["evidence"]
    details: list[str] = []
    if isinstance(evidence, HangEvidence | PastEvidence):
        for rank, stack in evidence.stacks.items():
            details += [f"Python stack of rank {rank}, innermost first:", *(f"  {line}" for line in stack.lines)]
            if not stack.lines:
                details.append(f"  none: {stack.reason}")
    held = row["held"]
    if held is not None and held["windows_held"] is not None and held["windows_judged"] is not None:
        details.insert(0, f"It held in {held['windows_held']} of {held['windows_judged']} windows of the run.")
    holds = not row["kind"].endswith(_PAST)
    return Entry(
        row["kind"], text, action, tuple(details), _ranks(row), row["since_step"], _seconds(held and held["since"]),
        ended_s=_seconds(held and held["until"]), holds=holds, order=order.row_key(row),
    )  # fmt: skip


def _ranks(row: VerdictRow) -> tuple[int, ...]:
    evidence: Any = row["evidence"]
    ranks = evidence.get("ranks") if isinstance(evidence, dict) else getattr(evidence, "ranks", None)
    if ranks:
        return tuple(ranks)
    return () if row["rank"] is None else (row["rank"],)


def _taken(before: dict[_Key, Entry], attempt: int, entry: Entry) -> Entry | None:
    """What held before of some of these ranks, of which more are known by now, or other ones. Taken out."""
    for key, each in before.items() if entry.comes_and_goes else ():
        if key[0] == attempt and each.kind == entry.kind and set(each.ranks) & set(entry.ranks):
            return before.pop(key)
    return None


def _joined(said: Entry, known: Entry) -> Entry:
    """What the report says, with the times that are known from here."""
    return dataclasses.replace(
        said,
        seen_s=known.seen_s,
        began_s=known.began_s if said.began_s is None else said.began_s,
        ended_s=known.ended_s if said.ended_s is None else said.ended_s,
    )


def _is_end_of(past: Entry, entry: Entry) -> bool:
    """Whether what is over is what held before."""
    same_kind = past.kind.startswith(entry.kind)
    return same_kind and (not past.ranks or not entry.ranks or bool(set(past.ranks) & set(entry.ranks)))


def _place(entry: Entry) -> tuple[order.Key, float]:
    """By what it has cost; of those of which that is not known, the newest first."""
    newest = -(entry.from_s or 0.0) if entry.comes_and_goes and entry.holds else 0.0
    return entry.order, newest


def _when_it_ended(entry: Entry) -> tuple[float, float]:
    return entry.ended_s or 0.0, float(entry.since_step or 0)


def _seconds(time: str | None) -> float | None:
    return None if time is None else datetime.datetime.fromisoformat(time).timestamp()
