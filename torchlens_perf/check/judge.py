"""Conclude from the figures of all ranks which rank or node is not as it should be. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

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
    DEVICE_FLOOR,
    ON_DEVICE,
    RankFigures,
    find_quantity,
)
from torchlens_perf.run.grouping import group_values
from torchlens_perf.verdicts.verdict import Evidence, Verdict

_T = TypeVar("_T")

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
    unit: str
    value: float
    usual: float
    """Median of the peers, or the value of the last check."""
    peers: int
    """Number of the peers; 0 for a comparison with the last check."""
    last_check: str = ""
    """Date of the last check, for a comparison with it."""

    @property
    def factor(self) -> float:
        """The number of times by which the value is worse."""
        ratio = self.value / self.usual
        return ratio if self.unit == "s" else 1 / ratio

    def describe(self) -> str:
        """Return the values in words."""
        usual = format_value(self.usual, self.unit)
        whose = (
            f"at the check of {self.last_check}"
            if self.last_check
            else f"in the median of {self.peers} others"
        )
        share = format_percent(self.value / self.usual)
        return f"{self.quantity}: {format_value(self.value, self.unit)}, {share} of {usual} {whose}"


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
    if unit == "s":
        return format_duration(value)
    return f"{value:,.0f} B" if unit == "B" and value < 1e5 else format_bytes(value, unit)


def find_outliers(
    values: Mapping[_T, Sequence[float]], name: str, floor: float
) -> Iterator[tuple[_T, Outlier]]:
    """Yield the keys whose values are worse than those of the others in almost every round.

    values: one value per round for each of several equal parts.
    """
    unit = find_quantity(name).unit
    rounds = min(map(len, values.values()), default=0)
    if len(values) < 2 or not rounds:
        return
    table = np.array([each[:rounds] for each in values.values()])
    if not (table > 0).all():
        return
    badness = np.log(table) * (1 if unit == "s" else -1)
    typical = np.median(badness, axis=1)
    # Two parts cannot tell what is usual, so a larger difference is required.
    least = math.log(floor) * (2 if len(values) == 2 else 1)
    for row, key in enumerate(values):
        others = np.delete(badness, row, axis=0)
        excess = np.sort(badness[row] - np.median(others, axis=0))[rounds // _ROUNDS_PER_ACCIDENT]
        spread = robust_standard_deviation(np.delete(typical, row))
        if excess > max(least, SPREAD_FACTOR * spread):
            usual = float(np.median(np.delete(table, row, axis=0)))
            yield key, Outlier(name, unit, float(np.median(table[row])), usual, len(values) - 1)


def judge_machines(everyone: Sequence[RankFigures]) -> list[Verdict]:
    """Return the verdicts on ranks and nodes, by the values that each measured alone."""
    ranks: dict[int, list[Outlier]] = {}
    nodes: dict[str, list[Outlier]] = {}
    for name in dict.fromkeys(name for each in everyone for name in each.of_rank):
        for alike in _group(everyone, lambda each: f"{each.device} {each.machine}"):
            values = {each.rank: each.of_rank.get(name, []) for each in alike}
            for rank, outlier in find_outliers(values, name, find_floor(name, alike[0].device)):
                ranks.setdefault(rank, []).append(outlier)
    firsts = [each for each in everyone if each.of_node]
    for name in dict.fromkeys(name for each in firsts for name in each.of_node):
        for alike in _group(firsts, lambda each: each.machine):
            hosts = {each.host: each.of_node[name] for each in alike if name in each.of_node}
            for host, outlier in find_outliers(hosts, name, find_floor(name, "CPU")):
                nodes.setdefault(host, []).append(outlier)
    for mates in _group(everyone, lambda each: each.host):
        found = [ranks.get(each.rank, []) for each in mates]
        shared = set.intersection(*({each.quantity for each in one} for one in found))
        if len(mates) > 1 and (shared or (mates[0].host in nodes and all(found))):
            nodes.setdefault(mates[0].host, [])[:0] = found[0]
            for each in mates:
                ranks.pop(each.rank, None)
    places = {each.rank: each.host for each in everyone}
    return [
        *(
            build_verdict(
                NODE, f"node {host}", found, [r for r, at in places.items() if at == host]
            )
            for host, found in nodes.items()
        ),
        *(
            build_verdict(RANK, f"rank {rank} ({places[rank]})", found, [rank])
            for rank, found in ranks.items()
        ),
    ]


def find_floor(name: str, device: str) -> float:
    """Return the least factor that is reported. device: "CPU", or the model of the GPU."""
    is_steady = device != "CPU" and name.startswith(ON_DEVICE)
    return DEVICE_FLOOR if is_steady else find_quantity(name).floor


def build_verdict(
    kind: str, subject: str, found: Iterable[Outlier], ranks: Sequence[int], reason: str = ""
) -> Verdict:
    """Return the verdict on a part, with its worst value first."""
    worst = tuple(sorted(found, key=lambda each: -each.factor))
    action = find_quantity(worst[0].quantity).action if worst else "look at its log and its node."
    return Verdict(
        kind=kind,
        rank=ranks[0] if len(ranks) == 1 else None,
        confidence=0.9,
        action=action.format(subject=subject),
        evidence=CheckEvidence(
            ranks=tuple(ranks), subject=printable(subject), found=worst, reason=reason
        ),
    )


def _group(everyone: Iterable[RankFigures], key: object) -> list[list[RankFigures]]:
    return list(group_values((key(each), each) for each in everyone).values())  # type: ignore[operator]
