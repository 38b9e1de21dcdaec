"""Verdicts in a terminal: the sentence, since when it has held, and the next action; and which of them are over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import printable
from torchlens_perf.report.device_table import oom_table
from torchlens_perf.run.verdicts import sentence_and_action
from torchlens_perf.verdicts.words import order
from torchlens_perf.verdicts.words.evidence import PastEvidence
from torchlens_perf.verdicts.words.hang import HangEvidence
from torchlens_perf.verdicts.words.over import held_words

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Report, VerdictRow

_STYLES = {
    "hang": "bold red", "hang_ended": "bold red", "out_of_memory": "bold red", "straggler": "bold red",
    "died": "bold red", "none": "bold green", "no_steps": "bold yellow",
}  # fmt: skip
_FINDINGS = frozenset({"hang", "out_of_memory", "died", "straggler", "imbalance", "slow_link"})
_MAX_OVER = 4


def is_finding(row: VerdictRow) -> bool:
    """Whether something is wrong with a rank, a link or the job, rather than with where its time goes."""
    return row["kind"] in _FINDINGS or order.ended_in_it(row["evidence"])


def verdict_parts(row: VerdictRow, report: Report, *, brief: bool = False) -> Iterator[RenderableType]:
    """The verdict with its evidence. brief: without since when it has held, unless it is a finding, or over by now."""
    head, action = sentence_and_action(row["text"])
    text = Text(printable(head), style=_STYLES.get(row["kind"], "bold"))
    held = held_words(row["held"], report["run"]["started"])
    if held and (not brief or order.has_ended(row["held"]) or is_finding(row)):
        text.append(f"\n{held}", style="default dim not bold")
    if action:
        text.append("\nNext: ", style="bold")
        text.append(printable(action), style="default not bold")
    evidence = row["evidence"]
    for rank, stack in evidence.stacks.items() if isinstance(evidence, HangEvidence | PastEvidence) else ():
        text.append(f"\nPython stack of rank {rank}, innermost first:", style="bold")
        for line in stack.lines or [f"none: {stack.reason}"]:
            text.append("\n  " + printable(line), style="default not bold")
    yield Padding(text, (0, 0, 1, 2))
    if isinstance(evidence, dict) and "table" in evidence and evidence["table"] is not None:
        yield oom_table(evidence)
        yield Text("")


def earlier_parts(report: Report) -> Iterator[RenderableType]:
    """What held earlier in the run, the newest."""
    rows = [row for row in report["verdicts"] if row["is_over"]]
    if not rows:
        return
    text = Text("earlier in this run", style="bold")
    for row in rows[:_MAX_OVER]:
        text.append(f"\n{printable(row['text'])}", style="not bold")
        held = held_words(row["held"], report["run"]["started"])
        if held:
            text.append(f" {held}", style="default dim not bold")
    if len(rows) > _MAX_OVER:
        text.append(f"\nand {len(rows) - _MAX_OVER} more; --json has all", style="default dim not bold")
    yield Padding(text, (0, 0, 1, 2))


def earlier_line(rows: Sequence[VerdictRow]) -> str:
    """The same in a few words, of those rows that are over."""
    heads = [printable(row["text"]).partition(":")[0].removesuffix(".") for row in rows]
    more = f", and {len(heads) - 1} more" if len(heads) > 1 else ""
    return f"Earlier in this run: {heads[0]}{more}."
