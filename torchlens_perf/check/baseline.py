"""Keep the values of a check, with which later checks and verdicts of jobs on the same nodes compare."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from torchlens_perf.analysis.statistics.quantities import format_bytes, format_percent
from torchlens_perf.check.figures import TRANSFERS, RankFigures, collect, find_quantity
from torchlens_perf.check.judge import GROUP, Outlier, build_verdict, find_floor, locate
from torchlens_perf.check.tournament import Transfer
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.place.launcher import hash_texts
from torchlens_perf.store.run_folders import default_folder
from torchlens_perf.verdicts.verdict import Verdict

_NOTED = "matmul float32"
_MOST_LINKS = 10_000
"""Most links of a file. The ranks of larger clusters have no values of links."""


class Baseline(msgspec.Struct, frozen=True):
    """Values of a check of one cluster. A place is HOST/LOCAL_RANK, a host, or several places."""

    date: str
    passed: bool
    values: dict[str, dict[str, float]]
    """Values by quantity and place."""
    notes: dict[str, str]
    """Sentences for verdicts of jobs, by place, see report/last_check.py."""


def build_baseline(
    everyone: Sequence[RankFigures], transfers: Sequence[Transfer], date: str, *, passed: bool
) -> Baseline:
    """Return the values of a check."""
    values = {
        name: {place: median(rounds) for place, rounds in places.items()}
        for name, places in collect(everyone).items()
    }
    names = {each.rank: each.place for each in everyone}
    links = group_values(
        (f"{names[row.sender]} {names[row.receiver]}", row.bytes_per_s)
        for row in transfers[:_MOST_LINKS]
    )
    values[TRANSFERS] = {place: max(rates) for place, rates in links.items()}
    of_ranks = values.get(_NOTED, {})
    usual = median(of_ranks.values()) if of_ranks else 0.0
    notes = {
        place: f"At the check of {date}, its {_NOTED} reached {format_percent(value / usual)} of the median rank's."
        for place, value in of_ranks.items()
    } | {
        place: f"The check of {date} measured {format_bytes(rate, 'B/s')} on this link."
        for place, rate in values[TRANSFERS].items()
    }  # fmt: skip
    return Baseline(date, passed, values, notes)


def exchange_baseline(new: Baseline, hosts: Sequence[str]) -> Baseline | None:
    """Return the last check of these nodes, if there is one, and replace it.

    A check that found something does not replace one that passed.
    """
    path = default_folder() / f"check-{hash_texts(*sorted(set(hosts)))}.json"
    old = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        old = msgspec.json.decode(path.read_bytes(), type=Baseline)
    if old is None or new.passed or not old.passed:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(new))
        os.replace(partial, path)
    return old


def judge_change(
    old: Baseline, new: Baseline, everyone: Sequence[RankFigures]
) -> Iterator[Verdict]:
    """Yield the verdicts on what is worse than at the last check: all ranks, or some of them."""
    for name, values in new.values.items():
        before, whose = old.values.get(name, {}), f"at the check of {old.date}"
        worse = {
            place: math.log(value / before[place]) * (1 if find_quantity(name).unit == "s" else -1)
            for place, value in values.items()
            if value > 0 and before.get(place, 0) > 0
        }
        # Two checks have other programs around them, so a larger difference is required.
        least = 2 * math.log(find_floor(name, everyone[0].device))
        common = median(worse.values()) if len(worse) > 1 else 0.0
        if common > least:
            yield build_verdict(
                GROUP,
                "all nodes",
                [each.rank for each in everyone],
                [Outlier(name, median(values.values()), median(before.values()), whose)],
            )
        for place in (at for at, excess in worse.items() if excess - max(0.0, common) > least):
            yield build_verdict(
                *locate(place, everyone), [Outlier(name, values[place], before[place], whose)]
            )
