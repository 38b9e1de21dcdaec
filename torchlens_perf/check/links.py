"""Conclude from transfers which link, direction, port or switch is slow or loses segments. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.quantities import format_percent
from torchlens_perf.analysis.statistics.robust import robust_standard_deviation
from torchlens_perf.check.figures import TRANSFERS, RankFigures
from torchlens_perf.check.judge import LINK, SPREAD_FACTOR, Outlier, build_verdict, find_floor
from torchlens_perf.check.tournament import Pair, Transfer
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.verdicts.verdict import Verdict

_USUAL = 0.75
"""Quantile of the rates that is the usual one: of four nodes, one bad port slows half of the pairs."""
_MOST_LOST = 0.01
"""Share of segments that TCP sends again above which a link loses data."""
_LEAST_ROWS = 3
"""Least number of measurements that prove that a single link is bad."""
_MOST = 0.7
"""Least share of bad pairs of a bad port."""


class _Part(NamedTuple):
    """A bad part of the network: the ranks behind it, and the directions that are bad."""

    ranks: frozenset[int]
    sends: bool
    receives: bool
    pairs: frozenset[Pair]
    """The bad pairs (sender, receiver) that this part explains."""
    other: int | None = None
    """For a single link, the rank at its other end."""


class Rates:
    """The rates of all measured pairs of one kind: within nodes, or between nodes."""

    def __init__(self, transfers: Iterable[Transfer], floor: float) -> None:
        """floor: least factor between a rate and the usual one that is bad."""
        alike = group_values(((each.sender, each.receiver), each) for each in transfers)
        # Other work of a node makes a transfer slower, never faster.
        self.rates = {pair: max(each.bytes_per_s for each in rows) for pair, rows in alike.items()}
        self.unproven = {pair for pair, rows in alike.items() if len(rows) < _LEAST_ROWS}
        self.lost = {pair: median(each.lost_share for each in rows) for pair, rows in alike.items()}
        self.bad: set[Pair] = set()
        if not alike:
            return
        self.usual = float(np.quantile([*self.rates.values()], _USUAL))
        noise = [
            math.log(each.bytes_per_s / self.rates[pair])
            for pair, rows in alike.items() for each in rows if len(rows) > 2
        ]  # fmt: skip
        spread = robust_standard_deviation(np.array(noise)) if noise else 0.0
        # Most pairs are good if only single links are bad, so the median is the usual rate, too.
        middle = median(self.rates.values())
        most_lost = max(_MOST_LOST, 3 * float(np.quantile([*self.lost.values()], 1 - _USUAL)))
        lossless = sorted(rate for pair, rate in self.rates.items() if self.lost[pair] <= most_lost)
        # A link that loses segments harms no job if it is about as fast as others, or as those that
        # are the slowest without losses.
        harmless = min(middle / math.sqrt(floor), lossless[len(lossless) // 10])
        lossy = {
            pair
            for pair, share in self.lost.items()
            if share > most_lost and self.rates[pair] < harmless
        }
        least = self.usual / max(floor, math.exp(SPREAD_FACTOR * spread))
        self.bad = lossy | {pair for pair, rate in self.rates.items() if rate < least}
        self.unproven |= {pair for pair in self.bad - lossy if self.rates[pair] > middle / floor}

    def find_parts(self, ranks: set[Any]) -> Iterator[_Part]:
        """Yield the bad parts of the network between these ranks."""
        pairs = [pair for pair in self.rates if ranks.issuperset(pair)]
        bad = self.bad.intersection(pairs)
        if not bad:
            return
        *groups, main = sorted(_connect(pairs, bad), key=len)
        for group in (*groups, *({rank} for rank in main.intersection(*[itertools.chain(*bad)]))):
            sends = {pair for pair in pairs if pair[0] in group and pair[1] in main - group}
            receives = {pair for pair in pairs if pair[1] in group and pair[0] in main - group}
            are_bad = [len(bad & each) >= _MOST * max(1, len(each)) for each in (sends, receives)]
            if any(are_bad) and len({pair[1] for pair in sends}) > 1:
                explained = frozenset(pair for pair in bad if group.intersection(pair))
                yield _Part(frozenset(group), are_bad[0], are_bad[1], explained)
                bad = bad - explained
        bad = bad - self.unproven
        for a, b in sorted(bad):
            if a < b or (b, a) not in bad:
                both = {(a, b), (b, a)} & bad
                yield _Part(frozenset([a]), True, len(both) > 1, frozenset(both), b)


def _connect(pairs: Iterable[Pair], bad: set[Pair]) -> list[set[int]]:
    """Return the groups of ranks that are connected by pairs that are good in both directions."""
    groups: dict[int, set[int]] = {}
    for a, b in pairs:
        one, other = groups.setdefault(a, {a}), groups.setdefault(b, {b})
        if not {(a, b), (b, a)} & bad and one is not other:
            one |= other
            groups.update(dict.fromkeys(other, one))
    return list({id(each): each for each in groups.values()}.values())


def list_nodes(everyone: Iterable[RankFigures]) -> list[list[int]]:
    """Return the ranks of each node."""
    return list(group_values((each.host, each.rank) for each in everyone).values())


def judge_links(transfers: Sequence[Transfer], everyone: Sequence[RankFigures]) -> list[Verdict]:
    """Return the verdicts on links, ports and switches."""
    hosts, floor = (
        {each.rank: each.host for each in everyone},
        find_floor(TRANSFERS, everyone[0].device),
    )
    nodes = list_nodes(everyone)
    between = Rates(
        (each for each in transfers if hosts[each.sender] != hosts[each.receiver]), floor
    )
    within = Rates(
        (each for each in transfers if hosts[each.sender] == hosts[each.receiver]), floor
    )
    # Ranks on the CPUs of one node have no link between them.
    found = [
        _build_link_verdict([part], within, everyone)
        for node in nodes * (everyone[0].device != "CPU") for part in within.find_parts({*node})
    ]  # fmt: skip
    # Rank 0 of a node is measured with ranks 0 of other nodes, and so on.
    parts = [part for lane in itertools.zip_longest(*nodes) for part in between.find_parts({*lane})]
    alike = group_values(
        (
            (
                frozenset(map(hosts.get, part.ranks)),
                part.sends,
                part.receives,
                part.other is not None and hosts[part.other],
            ),
            part,
        )
        for part in parts
    )
    return found + [_build_link_verdict(each, between, everyone) for each in alike.values()]


def _build_link_verdict(
    parts: Sequence[_Part], rates: Rates, everyone: Sequence[RankFigures]
) -> Verdict:
    """Return the verdict on one part of the network, measured by one or several ranks of its nodes."""
    first, hosts = parts[0], {each.rank: each.host for each in everyone}
    ranks = sorted(rank for part in parts for rank in part.ranks)
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    switches = {each.switch for each in everyone if each.rank in ranks}
    pairs = frozenset[Pair]().union(*(part.pairs for part in parts))
    if first.other is not None:
        ranks = [ranks[0], first.other]
        ends = [f"rank {rank} ({hosts[rank]})" for rank in ranks]
        subject = (
            f"the link {('between {} and {}' if first.receives else 'from {} to {}').format(*ends)}"
        )
    elif len(names) > 1:
        is_known = len(switches) == 1 and "" not in switches
        switch = f"switch {switches.pop()}" if is_known else "the connection to other nodes"
        subject = f"{switch} of nodes {', '.join(names)}"
    else:
        where = (
            f"node {names[0]}"
            if ranks == [rank for rank, host in hosts.items() if host in names]
            else f"{format_rank_list(ranks)} ({names[0]})"
        )
        subject = f"the port of {where}"
    if first.other is None and first.sends != first.receives:
        subject += ", sending only" if first.sends else ", receiving only"
    lost = max(rates.lost[pair] for pair in pairs)
    reason = f"TCP sent {format_percent(lost)} of the segments again" if lost > _MOST_LOST else ""
    outlier = Outlier(
        TRANSFERS,
        median(rates.rates[pair] for pair in pairs),
        rates.usual,
        f"in the upper quartile of {len(rates.rates)} directions of pairs",
    )
    return build_verdict(LINK, subject, ranks, [outlier], reason)
