"""Choose which pairs of ranks are measured, in rounds in which each rank has one partner. Pure.

The first rounds, about log2 of the number of nodes, give each node partners that differ. Pairs that
stand out are measured again, also with other partners. The remaining time goes to other pairs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

Pair: TypeAlias = tuple[int, int]
Rounds: TypeAlias = list[list[Pair]]
"""Pairs of ranks that are measured at the same time, in both directions one after the other."""

_BATCH = 16
"""Most rounds after which pairs that stand out are examined."""
_TURNS = 2
"""Number of rounds of an examination, of the suspects and of ranks that have many of them."""
_EXAMINATIONS = 3
"""A pair that stands out this many times again is bad. Others had an accident."""
_PASSES = 3
"""Most measurements of a pair that does not stand out."""


class Transfer(NamedTuple):
    """One measured direction of a pair."""

    sender: int
    receiver: int
    bytes_per_s: float
    lost_share: float = 0.0
    """Share of the sender's TCP segments that were sent again."""


def make_circle(count: int) -> Rounds:
    """Return the rounds in which each of the players meets each other player once.

    Successive rounds have partners far from each other.
    """
    others = count + count % 2 - 1
    rounds = [
        [(at, others), *(((at + by) % others, (at - by) % others) for by in range(1, others // 2 + 1))]
        for at in range(others)
    ]  # fmt: skip
    steps = range(int(0.618 * others) + 1, 2 * others + 1)
    stride = next((each for each in steps if math.gcd(each, others) == 1), 1)
    return [
        [pair for pair in rounds[at * stride % others] if max(pair) < count]
        for at in range(others if count > 1 else 0)
    ]


def measure_rounds(
    nodes: Sequence[Sequence[int]],
    count_possible: Callable[[], int],
    measure: Callable[[Rounds], list[Transfer]],
    find_suspects: Callable[[Sequence[Transfer]], Iterable[Pair]],
) -> list[Transfer]:
    """Return the transfers that `measure` returned for all rounds.

    nodes: ranks of each node. count_possible: returns for how many rounds there is time.
    find_suspects: returns the pairs (sender, receiver) that stand out among transfers.
    """
    found: list[Transfer] = []
    inside = [make_circle(len(ranks)) for ranks in nodes]
    waiting: Rounds = [
        [(nodes[at][a], nodes[at][b]) for at, pairs in enumerate(each) for a, b in pairs]
        for each in itertools.zip_longest(*inside, fillvalue=[])
    ]
    between = [
        [pair for a, b in each for pair in zip(nodes[a], nodes[b], strict=False)]
        for each in make_circle(len(nodes))
    ]
    size = len(waiting) + math.ceil(math.log2(len(nodes))) + 1
    waiting = (waiting + between) * _PASSES
    while batch := waiting[: min(size, count_possible())]:
        waiting, size = waiting[len(batch) :], _BATCH
        measured = measure(batch)
        for _ in range(_EXAMINATIONS):
            if not (suspects := set(find_suspects(measured))):
                break
            measured += measure(list(_examine(suspects)))
        found += measured
    return found


def _examine(suspects: set[Pair]) -> Iterable[list[Pair]]:
    """Yield rounds that show what suspects have in common: a rank, several nodes, or only a link."""
    often = Counter(rank for pair in suspects for rank in pair)
    # A rank with a bad port is in more suspects than its partners.
    accused = sorted({max(pair, key=lambda rank: (often[rank], -rank)) for pair in suspects})
    for turn in range(_TURNS):
        repeated: dict[int, int] = {}
        for a, b in sorted(suspects, key=lambda pair: (often[pair[0]] + often[pair[1]], pair)):
            if a not in repeated and b not in repeated:
                repeated |= {a: b, b: a}
        yield [(a, b) for a, b in repeated.items() if a < b]
        if turn < len(circle := make_circle(len(accused))):
            yield [(accused[a], accused[b]) for a, b in circle[turn]]
