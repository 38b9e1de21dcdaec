"""Conclude from the figures of all ranks which rank or node is not as it should be. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from torchlens_perf.analysis.statistics.quantities import (
    format_bytes,
    format_duration,
    format_percent,
    printable,
)
from torchlens_perf.analysis.statistics.robust import robust_standard_deviation
from torchlens_perf.check.figures import (
    DEVICE_FLOORS,
    RankFigures,
    collect,
    find_quantity,
)
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.verdicts.verdict import Evidence, Verdict

SPREAD_FACTOR = 4.0
"""Least excess over peers, as a multiple of their spread."""
_ROUNDS_PER_ACCIDENT = 5
RANK, NODE, LINK, GROUP, NO_ANSWER = (
    "unfit_rank",
    "unfit_node",
    "unfit_link",
    "unfit_group",
    "no_answer",
)
STATUS = {
    RANK: "SLOW RANK", NODE: "SLOW NODE", LINK: "SLOW LINK", GROUP: "SLOW GROUP", NO_ANSWER: "NO ANSWER",
}  # fmt: skip
"""Kinds of the verdicts of a check, and their words in the report. No job has verdicts of these kinds."""


class Outlier(Struct, frozen=True):
    """A value that is worse than it should be."""

    quantity: str
    value: float
    usual: float
    whose: str
    """Of what the usual value is, such as "in the median of 7 others"."""

    def describe(self) -> str:
        """Return the values in words."""
        unit = find_quantity(self.quantity).unit
        usual = f"{format_percent(self.value / self.usual)} of {format_value(self.usual, unit)}"
        return f"{self.quantity}: {format_value(self.value, unit)}, {usual} {self.whose}"


class CheckEvidence(Evidence, frozen=True, tag="check"):
    """Evidence of a check: the part that is not as it should be, and the values that show it."""

    kinds = (RANK, NODE, LINK, GROUP, NO_ANSWER)
    subject: str
    """The part, such as "rank 3 (node-b)"."""
    found: tuple[Outlier, ...] = ()
    reason: str = ""
    """What else was found, such as the missing sign of life of a rank."""

    def describe(self, verdict: Verdict) -> list[str]:
        values = "; ".join(each.describe() for each in self.found)
        text = f"{self.subject}: {'. '.join(filter(None, (values, self.reason)))}."
        return [text[0].upper() + text[1:]]


def format_value(value: float, unit: str) -> str:
    """Format a value of a quantity with its unit."""
    if unit in ("s", "share"):
        return format_duration(value) if unit == "s" else format_percent(value)
    return f"{value:,.0f} B" if unit == "B" and value < 1e5 else format_bytes(value, unit)


def find_outliers(
    values: Mapping[str, Sequence[float]], name: str, floor: float
) -> Iterator[tuple[str, Outlier]]:
    """Yield the places whose values are worse than those of the others in almost every round.

    values: one value per round for each of several equal parts.
    """
    rounds = min(map(len, values.values()))
    table = np.array([each[:rounds] for each in values.values()])
    if len(values) < 2 or not rounds or not (table > 0).all():
        return
    badness = np.log(table) * (1 if find_quantity(name).unit == "s" else -1)
    typical = np.median(badness, axis=1)
    # Two parts cannot tell what is usual, so a larger difference is required.
    least = math.log(floor) * (2 if len(values) == 2 else 1)
    for row, key in enumerate(values):
        others = np.delete(badness, row, axis=0)
        excess = np.sort(badness[row] - np.median(others, axis=0))[rounds // _ROUNDS_PER_ACCIDENT]
        spread = robust_standard_deviation(np.delete(typical, row))
        # Rounds differ, so the medians over all rounds must differ as much.
        excess = min(excess, typical[row] - np.median(np.delete(typical, row)))
        if excess > max(least, SPREAD_FACTOR * spread):
            yield (
                key,
                Outlier(
                    name,
                    value=float(np.median(table[row])),
                    usual=float(np.median(np.delete(table, row, axis=0))),
                    whose=f"in the median of {len(values) - 1} others",
                ),
            )


def judge_machines(everyone: Sequence[RankFigures]) -> list[Verdict]:
    """Return the verdicts on ranks and nodes, and on groups if no rank or node explains them."""
    found: dict[str, list[Outlier]] = {}
    kinds = {each.place: f"{each.device} {each.machine}" for each in everyone}
    kinds |= {each.host: each.machine for each in everyone}
    for name, values in collect(everyone).items():
        alike = group_values((kinds.get(place, len(place.split())), place) for place in values)
        for places in alike.values():
            floor = find_floor(name, everyone[0].device)
            for place, outlier in find_outliers({at: values[at] for at in places}, name, floor):
                found.setdefault(place, []).append(outlier)
    for host in {each.host for each in everyone}:
        mates = [each.place for each in everyone if each.host == host]
        shared = set.intersection(*({one.quantity for one in found.get(at, ())} for at in mates))
        if len(mates) > 1 and (shared or (host in found and all(at in found for at in mates))):
            found[host] = [one for at in (mates[0], host) for one in found.get(at, ())]
            found = {at: outliers for at, outliers in found.items() if at not in mates}
    only_groups = all(" " in place for place in found)
    return [
        build_verdict(*locate(place, everyone), outliers)
        for place, outliers in found.items()
        if only_groups or " " not in place
    ]


def locate(place: str, everyone: Iterable[RankFigures]) -> tuple[str, str, list[int]]:
    """Return the kind of a verdict on a place, the words for the place, and its ranks."""
    ranks = [each.rank for each in everyone if each.place in place.split() or each.host == place]
    if " " in place:
        return GROUP, f"communication of {format_rank_list(ranks)}", ranks
    if "/" in place:
        return RANK, f"rank {ranks[0]} ({place.rpartition('/')[0]})", ranks
    return NODE, f"node {place}", ranks


def find_floor(name: str, device: str) -> float:
    """Return the least factor that is reported. device: "CPU", or the model of the GPU."""
    steady = (floor for start, floor in DEVICE_FLOORS.items() if name.startswith(start))
    return next(steady if device != "CPU" else iter(()), find_quantity(name).floor)


def build_verdict(
    kind: str, subject: str, ranks: Sequence[int], found: Iterable[Outlier] = (), reason: str = ""
) -> Verdict:
    """Return the verdict on a part, with its worst value first."""
    worst = tuple(sorted(found, key=lambda each: -abs(math.log(each.value / each.usual))))
    action = find_quantity(worst[0].quantity).action if worst else "look at its log and its node."
    return Verdict(
        kind=kind,
        rank=ranks[0] if len(ranks) == 1 else None,
        confidence=0.9,
        action=action.format(subject=subject),
        evidence=CheckEvidence(
            ranks=tuple(ranks),
            cause=worst[0].quantity if worst else "",
            subject=printable(subject),
            found=worst,
            reason=printable(reason),
        ),
    )
