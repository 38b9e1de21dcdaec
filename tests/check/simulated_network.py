"""A simulated network of nodes, each with one rank, below switches."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from torchlens_perf.check.figures import DEVICE_FLOORS, TRANSFERS, RankFigures
from torchlens_perf.check.links import Rates, judge_links
from torchlens_perf.check.tournament import Pair, Transfer, measure_rounds
from torchlens_perf.verdicts.verdict import Verdict

_BYTES = 64e6
_OVERHEAD_S = 0.005


@dataclasses.dataclass
class Network:
    """Factors below 1 make a part of the network slow."""

    nodes: int
    seconds: float = 60.0
    per_switch: int = 32
    bytes_per_s: float = 25e9
    noise: float = 0.03
    sends: dict[int, float] = dataclasses.field(default_factory=dict)
    receives: dict[int, float] = dataclasses.field(default_factory=dict)
    switches: dict[int, float] = dataclasses.field(default_factory=dict)
    links: dict[Pair, float] = dataclasses.field(default_factory=dict)
    loses: dict[int, float] = dataclasses.field(default_factory=dict)
    spent_s: float = 0.0
    rounds: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.nodes)

    def transfer(self, sender: int, receiver: int) -> Transfer:
        switch = [rank // self.per_switch for rank in (sender, receiver)]
        across = [self.switches.get(each, 1.0) for each in switch if switch[0] != switch[1]]
        factors = [
            self.sends.get(sender, 1.0), self.receives.get(receiver, 1.0),
            self.links.get((sender, receiver), 1.0), *across,
        ]  # fmt: skip
        rate = (
            self.bytes_per_s * min(factors) * self._random.uniform(1 - self.noise, 1 + self.noise)
        )
        lost = max(self.loses.get(sender, 0.0), self.loses.get(receiver, 0.0))
        return Transfer(sender, receiver, rate, lost)

    def measure(self, rounds: Sequence[Sequence[Pair]]) -> list[Transfer]:
        """Measure all pairs of some rounds. A round takes as long as its slowest pair."""
        found = []
        for pairs in rounds:
            both = [[self.transfer(a, b), self.transfer(b, a)] for a, b in pairs]
            slowest = max(
                (sum(_BYTES / each.bytes_per_s for each in one) for one in both), default=0
            )
            self.spent_s += slowest + _OVERHEAD_S
            self.rounds += 1
            found += [each for one in both for each in one]
        return found

    def count_possible(self) -> int:
        """Return for how many rounds there is time, by those that were made."""
        a_round_s = self.spent_s / self.rounds if self.rounds else 2 * _OVERHEAD_S
        return max(0, int((self.seconds - self.spent_s) / a_round_s))

    def judge(self) -> list[Verdict]:
        found = measure_rounds(
            [[rank] for rank in range(self.nodes)],
            self.count_possible,
            self.measure,
            lambda rows: Rates(rows, DEVICE_FLOORS[TRANSFERS]).bad,
        )
        return judge_links(found, self.describe_ranks())

    def describe_ranks(self) -> list[RankFigures]:
        return [
            RankFigures(
                rank, f"n{rank}/0", f"n{rank}", "a GPU", "a CPU", f"leaf{rank // self.per_switch}"
            )
            for rank in range(self.nodes)
        ]
