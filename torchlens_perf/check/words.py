"""The report of a check as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from torchlens_perf.analysis.statistics.quantities import format_count, printable
from torchlens_perf.check.figures import RankFigures, find_quantity
from torchlens_perf.check.judge import STATUS, format_value
from torchlens_perf.verdicts.verdict import Verdict


def format_report(
    everyone: Sequence[RankFigures], verdicts: Sequence[Verdict], passed: str
) -> Iterator[str]:
    """Yield the lines of the report. passed: the first line without verdicts."""
    for verdict in verdicts:
        yield f"{STATUS[verdict.kind]}  {verdict.text}"
        yield f"  Next: {verdict.action}"
    if not verdicts:
        yield passed
    values: dict[str, dict[str, Sequence[float]]] = {}
    for each in everyone:
        for name, rounds in each.of_rank.items():
            values.setdefault(name, {})[f"rank {each.rank}"] = rounds
        for name, rounds in each.of_node.items():
            values.setdefault(name, {})[f"node {printable(each.host)}"] = rounds
    yield from _format_values(values)
    reasons = {name: reason for each in everyone for name, reason in each.not_measured.items()}
    for name, reason in reasons.items():
        yield f"not measured: {name} ({printable(reason)})"


def describe_extent(everyone: Sequence[RankFigures]) -> str:
    """Return the numbers of ranks and nodes in words."""
    nodes = len({each.host for each in everyone})
    return f"{format_count(len(everyone), 'rank')} on {format_count(nodes, 'node')}"


def _format_values(values: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    for name, rows in values.items():
        unit = find_quantity(name).unit
        medians = {subject: float(np.median(rounds)) for subject, rounds in rows.items()}
        worst = (max if unit == "s" else min)(medians, key=lambda each: medians[each])
        median = format_value(float(np.median(list(medians.values()))), unit)
        extreme = f"  worst: {format_value(medians[worst], unit)} ({worst})"
        yield f"  {name:24} {median:>14}{extreme * (len(medians) > 1)}"
