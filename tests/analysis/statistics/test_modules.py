"""Which modules are slower on one rank: among ranks that have the same ones, with names from this node alone."""

from __future__ import annotations

import numpy as np
import pytest

from torchlens_perf.analysis.statistics.modules import MAX_MODULES, ModuleTimes, digest, reported_modules

USUAL = {"head": 4e6, "embedding": 1e6, "layers.0": 2e6}
NAMES = ["embedding", "head", "layers.0"]


def heard(times: ModuleTimes, rank: int, *ns: float, names: list[str] = NAMES) -> None:
    """A rank of another node; what it sends has room for more modules than it has."""
    sent = np.zeros(MAX_MODULES, np.float32)
    sent[: len(ns)] = ns
    times.set_remote(rank, digest(names), sent)


def test_a_rank_of_another_node() -> None:
    """Its modules against the median of all others', by name; one of the others may be slow too."""
    times = ModuleTimes()
    times.set_local(0, USUAL)
    times.set_local(1, USUAL)
    heard(times, 2, 1e6, 4e6, 2e6)
    heard(times, 3, 1e6, 9e6, 2e6)
    heard(times, 4, 1e6, 4e6, 7e6)

    assert times.excess_ns(3) == {"embedding": 0.0, "head": 5e6, "layers.0": 0.0}
    assert times.excess_ns(4) == {"embedding": 0.0, "head": 0.0, "layers.0": 5e6}
    heard(times, 3, 1e6, 4e6, 2e6)
    assert set(times.excess_ns(3).values()) == {0.0}  # the newest counts


def test_what_cannot_be_told() -> None:
    """Nothing of a rank that was never heard of, has no modules, or modules that nobody else or none of us has."""
    times = ModuleTimes()
    times.set_local(0, USUAL)
    times.set_local(1, {})
    heard(times, 2, 5e6, names=["layers.9"])
    heard(times, 3, 5e6, names=["layers.9"])

    assert [times.excess_ns(rank) for rank in range(5)] == [{}] * 5
    heard(times, 4, 1e6, 4e6, 2e6)
    assert times.excess_ns(0) == times.excess_ns(4) == dict.fromkeys(NAMES, 0.0)


def test_other_modules_are_not_compared() -> None:
    """A rank that has not yet run one of the modules has other names, and is left out until it has."""
    times = ModuleTimes()
    times.set_local(0, USUAL)
    heard(times, 1, 1e6, 6e6, 2e6)
    heard(times, 2, 4e6, 2e6, names=NAMES[1:])

    assert times.excess_ns(1)["head"] == 2e6
    assert times.excess_ns(2) == {}


def test_more_modules_than_are_told() -> None:
    """The first by name, the same on all ranks; what is beyond is not compared."""
    many = {f"layers.{i:03d}": 1e6 for i in reversed(range(MAX_MODULES + 6))}
    times = ModuleTimes()
    times.set_local(0, many)
    heard(times, 1, *[3e6] * MAX_MODULES, names=reported_modules(many))

    assert list(times.excess_ns(1)) == [f"layers.{i:03d}" for i in range(MAX_MODULES)]
    assert times.excess_ns(1)["layers.063"] == pytest.approx(2e6)


def test_what_is_kept_of_many_ranks() -> None:
    """What a rank has sent is kept alone, not with all that came with it, and 16384 ranks are compared at once."""
    times = ModuleTimes()
    times.set_local(0, {f"layers.{i:02d}": 1e6 for i in range(64)})
    names = reported_modules({f"layers.{i:02d}": 0.0 for i in range(64)})
    together = np.full((16384, 64), 1e6, np.float32)
    together[777, 5] = 3e6
    for rank, row in enumerate(together[1:], 1):
        times.set_remote(rank, digest(names), row)
    assert all(kept.base is None for _, kept in times._times.values())

    assert {name: ns for name, ns in times.excess_ns(777).items() if ns} == {"layers.05": 2e6}
