"""A detector that starts in the middle of a run continues or ends earlier stragglers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.findings import episode, findings
from tests.support.saved import save_and_load
from tests.support.simulations import simulation
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings, UsualTimes
from torchlens_perf.verdicts.stragglers.resume import EarlierEpisodes

USUAL = (UsualTimes("same", "0-7", 60e6, 40e6),)


def looks(
    fault: str, steps: int, restart: int, seed: int = 0, noise: float = 0.1
) -> Iterator[tuple[int, Findings]]:
    """Yield the findings after every four steps. At step `restart`, another sidecar takes over."""
    judge, goes_on, found = StragglerDetector(), EarlierEpisodes(NOTHING), NOTHING
    for part in simulation(fault, seed=seed, noise=noise).steps(steps):
        for population, block in part.detector_rows(1):
            for first in range(int(block.key[block.key >= 0].min()), int(block.key.max()) + 1, 4):
                if first == restart:
                    judge, goes_on = StragglerDetector(), EarlierEpisodes(save_and_load(found))
                judge.add_bin_batch(population, block.select_steps(first, first + 4))
                found = goes_on.merge_into(judge.judge())
                yield first + 4, found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "fault",
    [
        "constant:rank=3,share=0.05,since=100",
        "constant:rank=3,share=0.3,since=100",
        "drifting:rank=3,share=0.2,over=60,since=40",
        "intermittent:rank=3,share=0.3,since=100",
    ],
)
def test_rank_that_stays_slow_over_a_restart_has_one_open_episode(fault: str, seed: int) -> None:
    """At first, the new detector has too few bins to find a slightly or intermittently slow
    rank.
    """
    seen = [
        (step, found.episodes) for step, found in looks(fault, 320, 200, seed, 0.2) if step >= 200
    ]

    assert {len(episodes) for _, episodes in seen} == {1}
    assert len({episode.key for _, (episode,) in seen}) == 1
    assert {(episode.rank, episode.until_step) for _, (episode,) in seen} == {(3, None)}
    assert seen[-1][1][0].last_step > 300


@pytest.mark.parametrize("noise", [0.05, 0.2])
@pytest.mark.parametrize("until", [200, 300])
def test_slowness_over_a_restart_is_one_episode_with_one_key(until: int, noise: float) -> None:
    """The episode also keeps its first step, and is not reopened after its end."""
    seen = list(looks(f"constant:rank=3,share=0.1,since=100,until={until}", 400, 200, noise=noise))
    (before,) = next(found.episodes for step, found in seen if step == 200)
    over = [
        found.episodes
        for _, found in seen
        if any(each.until_step is not None for each in found.episodes)
    ]

    assert {len(found.episodes) for _, found in seen} == {0, 1}
    assert {(each.key, each.since_step) for (each,) in over} == {(before.key, before.since_step)}
    assert len({each.until_step for (each,) in over}) == 1
    assert abs((over[0][0].until_step or 0) - until) <= 16
    assert len(over) >= 10


def test_episode_ends_if_the_new_detector_would_have_found_it() -> None:
    """The episode ends at the last step that the earlier detector judged."""
    enough = {"usual": USUAL, "rows": 64, "last_step": 300}
    for changed in (
        {"rows": 11},
        {"last_step": 180},
        {"detectable_ns": 21e6},
        {"detectable_ns": None},
        {
            "usual": (UsualTimes("same", "0-2,4-7", 60e6, 40e6),)
        },  # The rank's steps were not compared.
        {"rows": 0, "compared": 0, "detectable_ns": None},
    ):
        (left,) = (
            EarlierEpisodes(findings(episode()))
            .merge_into(findings(**{**enough, **changed}))
            .episodes
        )
        assert left.until_step is None, changed
    (left,) = EarlierEpisodes(findings(episode())).merge_into(findings(**enough)).episodes
    assert left.until_step == left.last_step + 1 == 151


@pytest.mark.parametrize(
    ("changed", "rows", "last_step"),
    [({"phase": "cpu"}, 95, 320), ({"slow_share": 0.25}, 80, 320), ({"z_score": 6.0}, 96, 280)],
)
def test_episode_that_needs_more_bins_to_be_found_ends_later(
    changed: dict[str, Any], rows: int, last_step: int
) -> None:
    """The three cases are lack of a CPU, intermittent slowness, and a low score."""
    for seen, until in (((rows, last_step), None), ((96, 320), 151)):
        now = findings(usual=USUAL, rows=seen[0], last_step=seen[1])
        (left,) = EarlierEpisodes(findings(episode(**changed))).merge_into(now).episodes
        assert left.until_step == until


def test_episode_below_the_detectable_excess_stays_open_after_a_restart() -> None:
    earlier = findings(episode(excess_ns=2e6))
    ends = [
        EarlierEpisodes(earlier)
        .merge_into(
            replace(findings(usual=USUAL, rows=200, last_step=500), detectable_ns=detectable_ns)
        )
        .episodes[0]
        .until_step
        for detectable_ns in (None, 2.1e6, 1.9e6)
    ]
    assert ends == [None, None, 151]


def test_slowness_after_a_healthy_time_is_another_episode() -> None:
    """All bins arrive at once, as after a long time without a sidecar."""
    goes_on = EarlierEpisodes(findings(episode()))
    found = goes_on.merge_into(findings(episode(since=400), usual=USUAL, rows=200, last_step=450))
    assert [(each.since_step, each.until_step, each.named_step) for each in found.episodes] == [
        (400, None, 412),
        (100, 151, 112),
    ]


def test_slowness_in_the_first_bins_after_a_restart_continues_the_episode() -> None:
    """The number of missed steps makes no difference."""
    goes_on = EarlierEpisodes(findings(episode()))
    (left,) = goes_on.merge_into(findings(usual=USUAL, rows=12, last_step=920)).episodes
    assert left.until_step is None
    (same,) = goes_on.merge_into(
        findings(episode(since=911), usual=USUAL, rows=16, last_step=924)
    ).episodes
    assert (same.since_step, same.named_step, same.until_step) == (100, 112, None)


def test_ended_episodes_are_listed_after_open_ones() -> None:
    over = episode(5, until=160, cost_ns=90e6)
    found = EarlierEpisodes(findings(over, episode())).merge_into(
        findings(episode(since=155), usual=USUAL)
    )
    assert [(each.rank, each.key) for each in found.episodes] == [(3, (3, 112)), (5, (5, 112))]
    assert found.episodes[1] == over
