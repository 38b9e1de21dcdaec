"""The report of a check as text. Pure."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from torchlens_perf.analysis.statistics.quantities import format_count, printable
from torchlens_perf.check.figures import RankFigures, find_quantity
from torchlens_perf.check.judge import STATUS, format_value
from torchlens_perf.verdicts.verdict import Verdict

_LONGEST_PLACE = 40


def format_report(
    everyone: Sequence[RankFigures], verdicts: Sequence[Verdict],
    values: Mapping[str, Mapping[str, float]], *, is_compared: bool,
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of the report. values: by quantity and place."""
    for verdict in verdicts:
        yield f"{STATUS[verdict.kind]}  {verdict.text}"
        yield f"  Next: {verdict.action}"
    if not verdicts:
        nodes = format_count(len({each.host for each in everyone}), "node")
        result = "OK  {}: nothing is slow" if is_compared else "NOT COMPARED  {}: no equal part"
        yield result.format(f"{format_count(len(everyone), 'rank')} on {nodes}")
    for name, places in values.items():
        if places:
            unit = find_quantity(name).unit
            worst = (max if unit == "s" else min)(places, key=lambda each: places[each])
            extreme = f"  worst: {format_value(places[worst], unit)} ({printable(worst)[:_LONGEST_PLACE]})"
            yield f"  {name:44} {format_value(median(places.values()), unit):>14}{extreme * (len(places) > 1)}"
    for name, reason in ChainMap(*(each.not_measured for each in everyone)).items():
        yield f"not measured: {name} ({printable(reason)})"
