"""The report's verdicts as lines: what holds, then what is over, each with its time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from torchlens_perf.run.verdicts import sentence_and_action
from torchlens_perf.top.overview import clock_time, seconds_of
from torchlens_perf.top.pace import time_left
from torchlens_perf.verdicts.words.evidence import PastEvidence
from torchlens_perf.verdicts.words.hang import HangEvidence

if TYPE_CHECKING:
    from torchlens_perf.top.lettering import Lettering
    from torchlens_perf.verdicts.words.report import VerdictRow

_URGENT = ("hang", "out_of_memory", "died", "straggler")


def verdict_lines(rows: Sequence[VerdictRow], width: int, lettering: Lettering, *, details: bool = False) -> list[Text]:
    """What holds and what is over, a time before each. details: with the lines of evidence."""
    lines: list[Text] = []
    for row in rows:
        style = "dim" if row["is_over"] else "bold red" if row["kind"] in _URGENT else "bold"
        if row["kind"] == "none":
            style = "bold green"
        (text, action), when = sentence_and_action(row["text"]), _when(row)
        for number, line in enumerate(lettering.wrapped(f"{when}  {text}" if when else text, width, 2)):
            head = min(len(when), len(line)) if number == 0 else 0
            lines.append(Text.assemble((line[:head], "dim" if row["is_over"] else "cyan"), (line[head:], style)))
        if action:
            for number, line in enumerate(lettering.wrapped(f"  Next: {action}", width, 2)):
                head = len("  Next:") if number == 0 else 0
                lines.append(Text.assemble((line[:head], "bold"), line[head:]))
        for each in _details(row) if details else ():
            lines += [Text(line) for line in lettering.wrapped(f"  {each}", width, 4)]
    return lines


def _when(row: VerdictRow) -> str:
    """Return when it began; of what is over, when that was and for how long it held. "" where that is not known."""
    times = (None, None) if row["held"] is None else (row["held"]["since"], row["held"]["until"])
    began_s, ended_s = (None if time is None else seconds_of(time) for time in times)
    if not row["is_over"]:
        return "" if began_s is None else f"since {clock_time(began_s)}"
    if ended_s is None:
        return "over:"
    lasted = "" if began_s is None else f" after {time_left(max(0.0, ended_s - began_s))}"
    return f"{clock_time(ended_s)} over{lasted}:"


def _details(row: VerdictRow) -> Iterator[str]:
    """Return lines of evidence, such as Python stacks."""
    held, evidence = row["held"], row["evidence"]
    if held is not None and held["windows_held"] is not None and held["windows_judged"] is not None:
        yield f"It held in {held['windows_held']} of {held['windows_judged']} windows of the run."
    for rank, stack in evidence.stacks.items() if isinstance(evidence, HangEvidence | PastEvidence) else ():
        yield f"Python stack of rank {rank}, innermost first:"
        yield from (f"  {line}" for line in stack.lines or [f"none: {stack.reason}"])
