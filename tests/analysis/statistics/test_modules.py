"""Modules that are slower on one rank than on other ranks with the same modules."""

from __future__ import annotations

import numpy as np
import pytest

from torchlens_perf.analysis.statistics.modules import (
    MAX_MODULES,
    ModuleTimes,
    digest_names,
    select_reported_modules,
)

USUAL = {"head": 4e6, "embedding": 1e6, "layers.0": 2e6}
NAMES = ["embedding", "head", "layers.0"]


def heard(times: ModuleTimes, rank: int, *ns: float, names: list[str] = NAMES) -> None:
    """Add a rank of another node. The rank's message contains fewer modules than it can."""
    sent = np.zeros(MAX_MODULES, np.float32)
    sent[: len(ns)] = ns
    times.set_times_of_remote_rank(rank, digest_names(names), sent)


def test_modules_of_a_rank_are_compared_with_the_median_of_all_others() -> None:
    """The rank is on another node. One of the other ranks may be slow, too."""
    times = ModuleTimes()
    times.set_times_of_local_rank(0, USUAL)
    times.set_times_of_local_rank(1, USUAL)
    heard(times, 2, 1e6, 4e6, 2e6)
    heard(times, 3, 1e6, 9e6, 2e6)
    heard(times, 4, 1e6, 4e6, 7e6)

    assert times.excess_over_median_ns(3) == {"embedding": 0.0, "head": 5e6, "layers.0": 0.0}
    assert times.excess_over_median_ns(4) == {"embedding": 0.0, "head": 0.0, "layers.0": 5e6}
    heard(times, 3, 1e6, 4e6, 2e6)
    # The newest times count.
    assert set(times.excess_over_median_ns(3).values()) == {0.0}


def test_rank_without_comparable_modules_has_no_excess() -> None:
    """The rank is unknown, has no modules, or shares its modules with no other rank or no rank of
    this node.
    """
    times = ModuleTimes()
    times.set_times_of_local_rank(0, USUAL)
    times.set_times_of_local_rank(1, {})
    heard(times, 2, 5e6, names=["layers.9"])
    heard(times, 3, 5e6, names=["layers.9"])

    assert [times.excess_over_median_ns(rank) for rank in range(5)] == [{}] * 5
    heard(times, 4, 1e6, 4e6, 2e6)
    assert (
        times.excess_over_median_ns(0)
        == times.excess_over_median_ns(4)
        == dict.fromkeys(NAMES, 0.0)
    )


def test_rank_with_different_module_names_is_not_compared() -> None:
    """A rank that has not yet run one of the modules is left out until it has."""
    times = ModuleTimes()
    times.set_times_of_local_rank(0, USUAL)
    heard(times, 1, 1e6, 6e6, 2e6)
    heard(times, 2, 4e6, 2e6, names=NAMES[1:])

    assert times.excess_over_median_ns(1)["head"] == 2e6
    assert times.excess_over_median_ns(2) == {}


def test_modules_beyond_the_limit_are_not_compared() -> None:
    """The first modules by name are compared, which are the same on all ranks."""
    many = {f"layers.{i:03d}": 1e6 for i in reversed(range(MAX_MODULES + 6))}
    times = ModuleTimes()
    times.set_times_of_local_rank(0, many)
    heard(times, 1, *[3e6] * MAX_MODULES, names=select_reported_modules(many))

    assert list(times.excess_over_median_ns(1)) == [f"layers.{i:03d}" for i in range(MAX_MODULES)]
    assert times.excess_over_median_ns(1)["layers.063"] == pytest.approx(2e6)


def test_memory_for_modules_of_many_ranks_is_limited() -> None:
    """For 16384 ranks, the modules' times are stored, but not the ranks' whole messages."""
    times = ModuleTimes()
    times.set_times_of_local_rank(0, {f"layers.{i:02d}": 1e6 for i in range(64)})
    names = select_reported_modules({f"layers.{i:02d}": 0.0 for i in range(64)})
    together = np.full((16384, 64), 1e6, np.float32)
    together[777, 5] = 3e6
    for rank, row in enumerate(together[1:], 1):
        times.set_times_of_remote_rank(rank, digest_names(names), row)
    assert all(kept.base is None for _, kept in times._times.values())

    assert {name: ns for name, ns in times.excess_over_median_ns(777).items() if ns} == {
        "layers.05": 2e6
    }
