"""Find wrong numbers: NaN, infinity, outliers, and replicated parameters that differ. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.run.ring import GRADIENT_NORM, LOSS

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.number_checks import NumberChecks, ValueChecks
    from torchlens_perf.verdicts.words.report import (
        CheckedNumbers,
        CheckedRank,
        NumberOutlier,
        Outlier,
        WrongNumbers,
    )

PARAMETERS = "parameters"
_MAX_NAMES = 4


def find_wrong_numbers(
    checks: Mapping[int, NumberChecks], slow: Collection[int]
) -> CheckedNumbers | None:
    """Return the checked numbers of all ranks, and what is wrong; None if nothing was checked.

    checks: by rank. slow: ranks that are or were slow.
    """
    if not any(each.hashed or each.values for each in checks.values()):
        return None
    compared, wrong = _compare_parameters(checks)
    for name in (LOSS, GRADIENT_NORM):
        wrong += _find_not_finite(name, checks)
    for each in wrong:
        each["is_slow"] = bool(set(each["ranks"]) & set(slow)) and not each["is_everywhere"]
    ranks: list[CheckedRank] = [
        {
            "rank": rank,
            "parameters": each.hashed,
            "loss": _describe_values(each.values.get(LOSS)),
            "gradient_norm": _describe_values(each.values.get(GRADIENT_NORM)),
        }
        for rank, each in sorted(checks.items())
    ]
    wrong.sort(key=lambda each: (each["is_everywhere"], each["since_step"]))
    outliers = [row for name in (LOSS, GRADIENT_NORM) for row in _find_outliers(name, checks)]
    return {"compared": compared, "wrong": wrong, "outliers": outliers, "ranks": ranks}


def _compare_parameters(checks: Mapping[int, NumberChecks]) -> tuple[int, list[WrongNumbers]]:
    """Return the number of ranks that were compared, and those that differ from most others.

    Of two ranks that differ, none is known to be right. Ranks that never agree are not replicas.
    """
    by_check: dict[tuple[int, int, str], dict[int, tuple[int, int]]] = defaultdict(dict)
    members: dict[int, set[int]] = defaultdict(set)
    for rank, each in checks.items():
        for found in (*each.earlier, *each.newest):
            by_check[found.group, found.check, found.name][rank] = found.bits, found.step
            members[found.group].add(rank)
    compared = set[int]()
    agreed: dict[int, list[tuple[int, str]]] = defaultdict(list)
    differed: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
    for (group, _, name), ranks in sorted(by_check.items(), key=lambda item: item[0][1]):
        usual, count = Counter(bits for bits, _ in ranks.values()).most_common(1)[0]
        is_pair = len(members[group]) == 2
        # Without a majority it is not known which ranks differ, except for a pair.
        if len(ranks) < 2 or (2 * count <= len(ranks) and not is_pair):
            continue
        compared.update(ranks)
        others = {rank for rank, (bits, _) in ranks.items() if bits != usual}
        if others and is_pair:
            others = set(ranks)
        step = max(step for _, step in ranks.values())
        if others:
            differed[tuple(sorted(others))].append((step, name))
        for rank in set(ranks) - others:
            agreed[rank].append((step, name))
    wrong: list[WrongNumbers] = []
    for ranks_, found_ in differed.items():
        since, name = found_[0]
        before = [
            step
            for rank in ranks_
            for step, other in agreed[rank]
            if other == name and step < since
        ]
        if not all(agreed[rank] for rank in ranks_):
            continue
        wrong.append(
            {
                "what": PARAMETERS,
                "ranks": list(ranks_),
                "since_step": since,
                "agreed_step": max(before, default=None),
                "count": len(found_),
                "names": list(dict.fromkeys(name for _, name in found_))[:_MAX_NAMES],
                "is_everywhere": False,
                "is_certain": len(compared) > len(ranks_),
                "is_slow": False,
            }
        )
    return len(compared), wrong


def _find_not_finite(name: str, checks: Mapping[int, NumberChecks]) -> list[WrongNumbers]:
    """Return the ranks on which a number was first NaN or infinite.

    One step later, all ranks may have received it. A rank differs only if another rank's number was
    finite in this step or later.
    """
    values = {rank: each.values[name] for rank, each in checks.items() if name in each.values}
    firsts = {
        rank: each.first_not_finite
        for rank, each in values.items()
        if each.first_not_finite is not None
    }
    if not firsts:
        return []
    since = min(firsts.values())
    everywhere = not any(
        firsts.get(rank) != since and (each.last_finite or -1) >= since
        for rank, each in values.items()
    )
    ranks = sorted(rank for rank, step in firsts.items() if everywhere or step == since)
    return [
        {
            "what": name,
            "ranks": ranks,
            "since_step": since,
            "agreed_step": None,
            "count": max(values[rank].not_finite for rank in ranks),
            "names": [],
            "is_everywhere": everywhere,
            "is_certain": not everywhere,
            "is_slow": False,
        }
    ]


def _find_outliers(name: str, checks: Mapping[int, NumberChecks]) -> list[NumberOutlier]:
    """Return a row with the largest outlier of a number and the ranks that have it; [] without one.

    Losses are recorded in each step. Gradient norms are those of all ranks, and not each rank checks
    each of them.
    """
    values = {rank: each.values[name] for rank, each in checks.items() if name in each.values}
    found = [(each, rank) for rank, of in values.items() for each in of.outliers]
    if not found:
        return []
    largest, _ = max(found, key=lambda item: item[0].value - item[0].usual)
    ranks = sorted(rank for each, rank in found if each.step == largest.step)
    return [
        {
            "what": name,
            "ranks": ranks,
            "step": largest.step,
            "value": largest.value,
            "usual": largest.usual,
            "count": max(each.outlier_count for each in values.values()),
            "is_everywhere": name == GRADIENT_NORM or len(ranks) == len(values),
        }
    ]


def _describe_values(checks: ValueChecks | None) -> Outlier | None:
    if checks is None:
        return None
    sizes = np.abs(checks.newest)
    return {
        "count": checks.count,
        "not_finite": checks.not_finite,
        "median": float(np.median(sizes)) if len(sizes) else None,
        "max": float(sizes.max()) if len(sizes) else None,
    }
