"""The straggler detector on step bins of whole jobs with and without slow ranks."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.long import long, long_except
from tests.support.planted import MS, WORK_NS, Job, part_of, wider
from tests.support.saved import save_and_load
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.stragglers.candidates import (
    MIN_LOST_NS,
    MIN_ROWS,
    MIN_SHARE,
    WORKLOAD_FACTOR,
)
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.population import EVERY
from torchlens_perf.verdicts.stragglers.window import LATE_ROWS


def only(found: Findings) -> Episode:
    (episode,) = found.episodes
    return episode


def two_of_seven(first: int, end: int) -> np.ndarray:
    rows = np.arange(first, end)
    return rows[(rows % 7 == 1) | (rows % 7 == 4)]


class TestSlowRankIsReported:
    @pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
    @pytest.mark.parametrize(
        "phase", ["data", "forward", "backward", "optimizer", "host", "compute"]
    )
    def test_slow_rank_is_reported_with_phase_first_step_and_excess(
        self, ranks: int, phase: str
    ) -> None:
        """The rank is 6 % slower. Ranks that wait for the slow one are not reported."""
        rank = ranks // 2
        found = only(Job.of(ranks, 200, seed=1).slow(rank, 12, phase, slice(80, None)).judge())

        assert (found.rank, found.phase, found.until_step, found.from_start) == (
            rank,
            phase,
            None,
            False,
        )
        assert abs(found.since_step - 80) <= 4
        assert 80 < found.named_step < 80 + 3 * MIN_ROWS
        assert found.excess_ns == pytest.approx(12 * MS, rel=0.15)
        assert found.phase_excess_ns == pytest.approx(12 * MS, rel=0.25)
        assert found.work_ns - found.others_work_ns == pytest.approx(12 * MS, rel=0.15)
        assert 0.4 * found.excess_ns < found.cost_ns < 1.001 * found.excess_ns

    def test_rank_that_was_always_slow_is_slow_since_the_start(self) -> None:
        """Slow warm-up steps of another rank make no difference."""
        job = Job.of(4, 100).slow(3, 12)
        job.slow(0, 5000, rows=slice(0, 3))
        found = only(job.judge())

        assert (found.rank, found.from_start, found.since_step, found.judged_from_step) == (
            3,
            True,
            0,
            4,
        )

    def test_rank_that_was_slightly_slower_before_is_not_slow_since_the_start(self) -> None:
        """Before, its excess was 2.5 % of the step, less than is worth naming."""
        for seed in range(12):
            job = Job.of(4, 200, noise=0.02, seed=seed).slow(3, 5, "host")
            found = only(job.slow(3, 12, "host", slice(54, None)).judge())

            assert (found.rank, found.from_start) == (3, False), seed
            assert found.since_step > 0

    @pytest.mark.parametrize("since", [40, 220])
    def test_new_excess_is_found_among_ranks_with_lasting_differences(self, since: int) -> None:
        job = Job.of(64, 280, noise=0.004, seed=2)
        for rank in range(64):
            job.slow(rank, 0.3 * (rank % 8))
        found = only(job.slow(7, 12, rows=slice(since, None)).judge())

        assert (found.rank, found.until_step) == (7, None)
        assert found.named_step - since < 20
        assert abs(found.since_step - since) <= 4

    def test_slowness_that_moves_to_another_rank_is_two_episodes(self) -> None:
        job = (
            Job.of(4, 400, seed=2)
            .slow(0, 20, "data", slice(60, 200))
            .slow(1, 20, "data", slice(200, None))
        )
        now, before = job.judge().episodes

        assert (now.rank, now.until_step, before.rank) == (1, None, 0)
        assert before.until_step is not None
        assert abs(before.until_step - 200) <= 5
        assert abs(before.since_step - 60) <= 4
        assert abs(now.since_step - 200) <= 4
        assert before.excess_ns == pytest.approx(20 * MS, rel=0.15)

    @pytest.mark.parametrize("seed", [*range(4), 47])
    def test_episodes_of_one_rank_do_not_overlap(self, seed: int) -> None:
        """The rank becomes slow several times, and the noise is large."""
        job, draw = Job.of(2 + seed % 3, 600, noise=0.05, seed=seed), np.random.default_rng(seed)
        at = 60
        while at < 600:
            lasts, pause = int(draw.integers(10, 80)), int(draw.integers(10, 40))
            job.slow(1, float(draw.integers(12, 40)), rows=slice(at, min(600, at + lasts)))
            at += lasts + pause
        found = sorted(job.judge().episodes, key=lambda episode: episode.named_step)

        assert len(found) > 1
        for before, after in itertools.pairwise(found):
            assert before.until_step is not None
            assert before.until_step <= after.since_step

    @pytest.mark.parametrize("seed", range(8))
    def test_intermittent_slowness_is_reported_with_its_share_of_steps(self, seed: int) -> None:
        """The rank is slow in two of seven steps."""
        job = Job.of((2, 3, 4, 8)[seed % 4], 200, seed=seed).slow(
            1, 40, "host", two_of_seven(80, 200)
        )
        found = only(job.judge())

        assert (found.rank, found.phase, found.until_step) == (1, "host", None)
        assert found.named_step < 140
        assert abs(found.since_step - 80) <= 21
        assert found.slow_share == pytest.approx(2 / 7, abs=0.05)
        assert found.slow_excess_ns == pytest.approx(40 * MS, rel=0.15)

    @pytest.mark.parametrize("stalls", [[90], [62, 110], [100, 130, 160]])
    def test_single_stalls_change_neither_phase_nor_excess_of_an_episode(
        self, stalls: list[int]
    ) -> None:
        """Each stall takes five seconds."""
        job = Job.of(4, 260).slow(1, 12, rows=slice(60, None)).slow(1, 5000, "data", rows=stalls)
        found = only(job.judge())

        assert (found.rank, found.phase, found.until_step) == (1, "forward", None)
        assert abs(found.since_step - 60) <= 4
        assert found.named_step < 60 + 3 * MIN_ROWS
        assert found.excess_ns == pytest.approx(12 * MS, rel=0.15)

    def test_each_of_two_slow_ranks_costs_little_alone(self) -> None:
        """Without one of the slow ranks, the job waits for the other."""
        one, other = Job.of(4, 200).slow(1, 20).slow(2, 20).judge().episodes

        assert {one.rank, other.rank} == {1, 2}
        for found in (one, other):
            assert found.excess_ns == pytest.approx(20 * MS, rel=0.15)
            assert found.cost_ns < 3 * MS

    def test_rank_with_more_workload_is_reported_with_its_share_of_tokens(self) -> None:
        for ranks in (2, 4, 32):
            lengths = 1 + 0.05 * np.random.default_rng(ranks).standard_normal((ranks, 200))
            lengths[1, 60:] *= 1.4
            found = only(Job.of(ranks, 200).load(lengths, told=True).judge())

            assert (found.rank, found.phase) == (1, "compute")
            assert abs(found.since_step - 60) <= 4
            assert found.more_workload == pytest.approx(0.4, abs=0.06)

    def test_slow_rank_is_found_if_varying_workload_is_reported(self) -> None:
        """Without reported workload, the variation of the workload hides the slow rank."""
        lengths = np.clip(1 + 0.3 * np.random.default_rng(3).standard_normal((4, 150)), 0.1, 2)
        told, untold = (
            Job.of(4, 150).load(lengths, told=told).slow(2, 14, "backward", slice(60, None))
            for told in (True, False)
        )

        assert only(told.judge()).rank == 2
        assert abs(only(told.judge()).more_workload) < 0.1
        # Single steps without reported workload do not change the result.
        told.workload[1, [90, 149]] = np.nan
        assert (only(told.judge()).rank, only(told.judge()).until_step) == (2, None)
        assert untold.judge().episodes == ()


class TestLackOfACpu:
    def job(self, excess_ms: float, rows: slice, ranks: int = 4) -> Job:
        job = Job.of(ranks, 300, seed=3)
        job.ready_ns = 2 * MS * np.abs(np.random.default_rng(0).standard_normal((ranks, 300)))
        job.ready_ns[1, rows] += excess_ms * MS
        return job

    def test_rank_that_lacks_a_cpu_for_long_is_reported_in_phase_cpu(self) -> None:
        found = only(self.job(60, slice(100, None)).judge())

        assert (found.rank, found.phase) == (1, "cpu")
        assert abs(found.since_step - 100) <= 4
        assert found.named_step >= 100 + 6 * MIN_ROWS
        assert found.excess_ns == pytest.approx(60 * MS, rel=0.15)
        assert found.phase_excess_ns == found.excess_ns
        assert found.cost_ns == pytest.approx(58 * MS, rel=0.1)

    def test_short_lack_of_a_cpu_is_not_reported(self) -> None:
        """The scheduler may favour some ranks for seconds by chance."""
        assert self.job(60, slice(100, 100 + 5 * MIN_ROWS)).judge().episodes == ()

    def test_lack_of_a_cpu_in_fewer_than_half_of_the_steps_is_not_reported(self) -> None:
        job = self.job(0, slice(0))
        job.ready_ns[1, 50::3] += 200 * MS
        assert job.judge().episodes == ()

    def test_lack_of_a_cpu_is_not_reported_while_another_rank_is_slower(self) -> None:
        found = only(self.job(60, slice(100, None)).slow(2, 100, "data", slice(50, None)).judge())

        assert (found.rank, found.phase) == (2, "data")

    def test_small_excess_in_long_steps_is_reported_if_the_job_waits_for_it(self) -> None:
        """The excess is 8 % of the time with a CPU, and less than 3 % of the step."""
        random = np.random.default_rng(0)
        job = Job.of(12, 300, noise=1e-3)
        for rank in (1, 2):
            job.slow(rank, 0.08 * WORK_NS / MS)
        job.ready_ns = np.tile(random.uniform(0, 4 * WORK_NS, 300), (12, 1))
        assert {episode.rank for episode in job.judge().episodes} == {1, 2}

        # From here on, the rank that waits longest for a CPU arrives last.
        job.ready_ns = random.uniform(0, 4 * WORK_NS, (12, 300))
        found = job.judge()
        assert found.episodes == ()
        assert found.detectable_ns >= MIN_SHARE * found.step_ns

    def test_lack_of_a_cpu_is_not_reported_if_one_rank_has_no_measurement(self) -> None:
        job = self.job(60, slice(100, None))
        job.ready_ns[3] = np.nan
        assert job.judge().episodes == ()


def autocorrelated(
    random: np.random.Generator, shape: tuple[int, ...], factor: float = 0.5
) -> np.ndarray:
    values = random.standard_normal(shape)
    for row in range(1, shape[-1]):
        values[..., row] = factor * values[..., row - 1] + np.sqrt(1 - factor**2) * values[..., row]
    return values


def stalls(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.standard_normal(shape) + (random.random(shape) < 0.01) * random.exponential(
        30, shape
    )


def contended(seed: int) -> Job:
    """Return a healthy job that waits for CPUs in 60 % of the step.

    Its ranks wander by 5 %, because other programs also take caches.
    """
    random = np.random.default_rng(seed)
    job = Job.of(4, 160, noise=0.05, deviations=autocorrelated(random, (4, 160), 0.8))
    job.ready_ns = np.tile(random.exponential(2 * WORK_NS, 160), (4, 1))
    return job


NOISES: dict[str, Any] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "heavy tails": lambda random, shape: random.standard_t(3, shape),
    "autocorrelated": autocorrelated,
    "giant stalls": stalls,
}


class TestNoRankIsReported:
    @pytest.mark.parametrize("jobs", [5, *long(50)])
    @pytest.mark.parametrize("ranks", [4, 64, *long(2, 16)])
    @pytest.mark.parametrize("noise", long_except({"normal", "heavy tails"}, NOISES))
    def test_no_rank_is_reported_in_healthy_jobs(self, noise: str, ranks: int, jobs: int) -> None:
        share = 0.01 if noise == "autocorrelated" else 0.05
        deviations = NOISES[noise](np.random.default_rng(ranks), (jobs, ranks, 80))
        for each in deviations:
            assert Job.of(ranks, 80, noise=share, deviations=each).judge().episodes == ()

    def test_wandering_ranks_beside_cpu_contention_are_not_slow(self) -> None:
        assert sum(bool(contended(seed).judge().episodes) for seed in range(12)) <= 1

    def test_excess_of_shared_caches_is_not_reported_beside_contention(self) -> None:
        """On two CPUs, a healthy rank of four was slower by 4 % from start to end."""
        job = Job.of(4, 160, noise=1e-3).slow(2, 0.04 * WORK_NS / MS)
        assert [each.rank for each in job.judge().slow_now] == [2]

        job.ready_ns = np.full((4, 160), 0.6 * WORK_NS)
        assert job.judge().episodes == ()

    def test_slow_rank_beside_cpu_contention_is_reported(self) -> None:
        found = [
            contended(seed).slow(2, 40, "compute", slice(40, None)).judge().slow_now
            for seed in range(12)
        ]
        assert sum([each.rank for each in ranks] == [2] for ranks in found) >= 11

    @pytest.mark.long
    def test_autocorrelated_noise_reports_few_ranks_for_a_limited_time(self) -> None:
        """Steps vary by 5 % and are similar to their neighbours, so ranks look slow for a while."""
        deviations = autocorrelated(np.random.default_rng(1), (60, 4, 160))
        found = [Job.of(4, 160, noise=0.05, deviations=each).judge() for each in deviations]

        assert sum(len(each.episodes) > 0 for each in found) <= 3
        assert sum(episode.until_step is None for each in found for episode in each.episodes) <= 2

    @pytest.mark.long
    def test_episode_of_a_short_excess_ends_although_noise_continues(self) -> None:
        for seed in (6, 10, 15, 16):
            found = only(
                Job.of(2, 600, noise=0.05, seed=seed).slow(1, 16, rows=slice(40, 70)).judge()
            )
            assert found.until_step is not None
            assert abs(found.until_step - 70) <= 10

    def test_episode_ends_when_its_excess_may_be_chance(self) -> None:
        """Steps vary by 10 %: what is left of a short excess says little."""
        for seed in (25, 40, 41, 59):
            job = Job.of(2, 240, seed=seed, noise=0.1).slow(1, 70, "compute", slice(64, 76))
            assert all(each.is_over for each in job.judge().episodes if each.rank == 1)

    @pytest.mark.parametrize("noise", NOISES)
    def test_no_rank_is_reported_in_500_judgements_of_a_healthy_job(self, noise: str) -> None:
        share = 0.01 if noise == "autocorrelated" else 0.05
        deviations = NOISES[noise](np.random.default_rng(7), (4, 2000))
        assert Job.of(4, 2000, noise=share, deviations=deviations).judge().episodes == ()

    @pytest.mark.parametrize("told", [True, False])
    def test_no_rank_is_reported_for_random_workload(self, told: bool) -> None:
        """Sequences have random lengths, which are reported or not."""
        for seed in range(20):
            ranks = (2, 3, 4, 8)[seed % 4]
            lengths = np.clip(
                1 + 0.3 * np.random.default_rng(seed).standard_normal((ranks, 120)), 0.1, 2
            )
            assert Job.of(ranks, 120, seed=seed).load(lengths, told=told).judge().episodes == ()

    def test_random_workload_raises_the_detectable_excess(self) -> None:
        lengths = np.clip(1 + 0.3 * np.random.default_rng(3).standard_normal((4, 200)), 0.1, 2)
        found = Job.of(4, 200, noise=0.001).load(lengths, told=True).judge()

        assert found.detectable_ns >= MIN_SHARE * WORKLOAD_FACTOR * found.step_ns

    def test_excess_below_three_percent_of_the_step_is_not_reported(self) -> None:
        assert Job.of(4, 200, noise=1e-4).slow(1, 0.02 * WORK_NS / MS).judge().episodes == ()
        assert only(Job.of(4, 200, noise=1e-4).slow(1, 0.04 * WORK_NS / MS).judge()).rank == 1

    @pytest.mark.parametrize(
        ("excess_ms", "rows", "named"),
        [(4, 20, False), (4, 70, True), (12, 20, True)],
        ids=["short", "long", "much"],
    )
    def test_short_disturbance_is_not_reported_unless_it_is_long_or_large(
        self, excess_ms: int, rows: int, named: bool
    ) -> None:
        """Steps of 50 ms are 8 % longer for one second, for three seconds, or 24 % longer."""
        job = Job.of(4, 120)
        job.parts_ns /= 4  # Steps of 50 ms.
        found = job.slow(1, excess_ms, rows=slice(40, 40 + rows)).judge()

        assert [episode.rank for episode in found.episodes] == [1] * named

    @pytest.mark.parametrize("width", [1, 4])
    def test_detectable_excess_of_a_short_run_is_reported_and_half_of_it_is_not(
        self, width: int
    ) -> None:
        job = Job.of(4, 44 * width, noise=1e-3)
        job.parts_ns /= 4 * width
        rows = slice(4 * width, None)
        min_ns = judged_in_rows(job, width).detectable_ns

        assert min_ns == pytest.approx(MIN_LOST_NS / (40 * width), rel=0.3)
        assert (
            only(judged_in_rows(copy.deepcopy(job).slow(1, min_ns / MS, rows=rows), width)).rank
            == 1
        )
        assert (
            judged_in_rows(copy.deepcopy(job).slow(1, min_ns / MS / 2, rows=rows), width).episodes
            == ()
        )

    @pytest.mark.parametrize("noise", [0.03, *long(0.001)])
    @pytest.mark.parametrize("step_ms", [46, *long(10, 200)])
    def test_detectable_excess_is_reported_in_nine_of_ten_jobs(
        self, noise: float, step_ms: int
    ) -> None:
        named = 0
        for seed in range(10):
            job = Job.of(4, 200, noise=noise, seed=seed)
            job.parts_ns *= step_ms * MS / WORK_NS
            min_ns = job.judge().detectable_ns
            named += [episode.rank for episode in job.slow(1, min_ns / MS).judge().episodes] == [1]
        assert named >= 9

    @pytest.mark.parametrize(("ranks", "share"), [(4, 0.0175), *long((64, 0.02))])
    def test_half_of_the_detectable_excess_is_not_reported_after_a_long_time(
        self, ranks: int, share: float
    ) -> None:
        named = [
            only_rank
            for seed in range(6)
            for only_rank in (
                Job.of(ranks, 600, noise=0.02, seed=seed)
                .slow(1, share * WORK_NS / MS)
                .judge()
                .episodes
            )
        ]
        assert len(named) <= 1

    @pytest.mark.long
    def test_slow_rank_is_reported_if_step_bins_are_shorter_than_requested(self) -> None:
        job = Job.of(4, 1200, noise=1e-3)
        job.parts_ns *= 9 * MS / WORK_NS
        assert only(job.slow(1, 0.5, rows=slice(100, None)).judge()).rank == 1

    def test_slowest_of_many_differing_ranks_is_not_reported(self) -> None:
        """Eight or more ranks show their usual spread."""
        spread = np.linspace(-15, 15, 16)
        job = Job.of(16, 200)
        for rank, excess_ms in enumerate(spread):
            job.slow(rank, float(excess_ms))

        assert job.judge().episodes == ()
        assert only(job.slow(3, 80).judge()).rank == 3

    def test_no_rank_is_reported_if_all_ranks_become_slow(self) -> None:
        job = Job.of(4, 200)
        job.parts_ns[:, 100:] *= 1.5
        assert job.judge().episodes == ()


class TestHysteresis:
    @pytest.mark.parametrize("noise", [0.04, *long(0.01)])
    def test_lasting_fault_is_one_episode(self, noise: float) -> None:
        """The fault lasts 1500 step bins, also with an excess close to the noise."""
        found = only(Job.of(4, 2000, noise=noise).slow(1, 20, rows=slice(500, None)).judge())

        assert (found.until_step, found.last_step) == (None, 1999)
        assert found.since_step == pytest.approx(500, abs=4 if noise == 0.01 else 16)

    def test_lasting_intermittent_fault_is_one_episode(self) -> None:
        found = only(Job.of(4, 2000).slow(1, 40, "host", two_of_seven(500, 2000)).judge())

        assert (found.until_step, found.last_step) == (None, 1999)

    def test_fault_that_returns_after_a_long_time_is_a_second_episode(self) -> None:
        job = Job.of(4, 400).slow(1, 20, rows=slice(50, 150)).slow(1, 20, rows=slice(300, None))
        now, before = job.judge().episodes

        assert [
            round(step / 10) for step in (before.since_step, before.until_step or 0, now.since_step)
        ] == [5, 15, 30]


def with_splits(draw: Any, job: Job) -> Iterator[tuple[int, slice, bool]]:
    """Yield the step bins of all ranks in random pieces, and whether to judge after each piece.

    The bins of each rank are in order.
    """
    left = dict.fromkeys(range(job.ranks), 0)
    while left:
        rank = draw(st.sampled_from(sorted(left)))
        end = min(job.rows, left[rank] + draw(st.integers(1, 40)))
        yield rank, slice(left[rank], end), draw(st.booleans())
        left[rank] = end
        if end == job.rows:
            del left[rank]


class TestOrderAndSplitOfBins:
    JOB = (
        Job.of(3, 60, seed=4)
        .slow(1, 30, "data", slice(12, 36))
        .slow(2, 30, "forward", slice(36, None))
    )
    WHOLE = JOB.judge()

    @given(data=st.data())
    def test_findings_do_not_depend_on_how_step_bins_are_split(self, data: st.DataObject) -> None:
        assert [(each.rank, each.until_step is None) for each in self.WHOLE.episodes] == [
            (2, True),
            (1, False),
        ]
        judge = StragglerDetector()
        judge.add_bin_batch("", self.JOB.block(rows=slice(0, 1)))
        for rank, rows, now in with_splits(data.draw, self.JOB):
            judge.add_rows(rank, self.JOB.rows_of(rank, rows))
            if now:
                judge.judge()

        assert judge.judge(final=True) == self.WHOLE

    @pytest.mark.long
    def test_bins_beyond_the_window_are_judged_like_bins_that_arrive_one_by_one(self) -> None:
        job = Job.of(3, 1000).slow(0, 20, rows=slice(100, 300)).slow(1, 20, rows=slice(700, None))
        judge = StragglerDetector()
        for row in range(0, 1000, 50):
            judge.add_bin_batch("", job.block(rows=slice(row, row + 50)))
            judge.judge()

        assert judge.judge(final=True) == job.judge()
        assert len(job.judge().episodes) == 2

    def test_renumbering_the_ranks_gives_the_same_findings(self) -> None:
        order = [2, 0, 1]
        mixed = dataclasses.replace(self.JOB, parts_ns=self.JOB.parts_ns[order]).judge()

        for found, expected in zip(mixed.episodes, self.WHOLE.episodes, strict=True):
            assert order[found.rank] == expected.rank
            assert dataclasses.replace(found, rank=0) == dataclasses.replace(expected, rank=0)

    @pytest.mark.parametrize("piece", [1, 3, 7, 200])
    def test_step_bins_of_different_widths_are_compared_in_the_widest(self, piece: int) -> None:
        """Bins of one, two and four steps arrive in pieces, and no bin is lost."""
        job = Job.of(3, 400, noise=0.02).slow(1, 20, "data", slice(100, None))
        rows = [wider(job.rows_of(rank), width) for rank, width in enumerate((1, 2, 4))]
        judge = StragglerDetector()
        for first in range(0, 400, 4 * piece):
            for each in rows:
                part = part_of(
                    each, first // each.width, first // each.width + 4 * piece // each.width
                )
                for at in range(0, len(part), piece):
                    judge.add_rows(rows.index(each), part_of(part, at, at + piece))
            judge.judge()
        found = judge.judge(final=True)

        assert (only(found).rank, only(found).phase) == (1, "data")
        assert abs(only(found).since_step - 100) <= 8
        assert found.rows == 100 - 4  # Only the warm-up is not compared.


def judged_in_rows(job: Job, width: int) -> Findings:
    """Return the findings on bins of `width` steps."""
    judge = StragglerDetector()
    for rank in range(job.ranks):
        judge.add_rows(rank, wider(job.rows_of(rank), width))
    return judge.judge(final=True)


def streamed(
    job: Job, hidden: dict[int, slice], piece: int = 10
) -> tuple[StragglerDetector, list[Findings]]:
    """Judge after every `piece` bins.

    `hidden` has the bins of a rank that never arrive.
    """
    judge, all_found = StragglerDetector(), []
    for first in range(0, job.rows, piece):
        for rank in range(job.ranks):
            not_here = hidden.get(rank, slice(0, 0))
            if not not_here.start <= first < not_here.stop:
                judge.add_rows(rank, job.rows_of(rank, slice(first, first + piece)))
        all_found.append(judge.judge())
    return judge, all_found


class TestLateAndMissingBins:
    def job(self, rows: int = 300) -> Job:
        return Job.of(4, rows, seed=5).slow(1, 20, "data", slice(60, None))

    def test_bins_wait_for_a_rank_that_is_at_most_64_bins_behind(self) -> None:
        _, found = streamed(self.job(), {3: slice(40, 40 + LATE_ROWS)})

        assert found[8].last_step == 39

    def test_rank_behind_by_more_than_64_bins_is_not_compared(self) -> None:
        _, found = streamed(self.job(), {3: slice(40, 1 << 30)})

        assert [each.last_step for each in found[8:12]] == [39, 39, 107, 119]
        assert only(found[-1]).rank == 1

    def test_rank_with_late_first_bins_is_compared_from_then_on(self) -> None:
        """Earlier findings are kept."""
        for rank in (0, 1):
            job = self.job().slow(3, 25, "host", slice(150, None))
            _, found = streamed(job, {rank: slice(0, 100)})
            slow = {each.rank: each for each in found[-1].episodes}

            assert set(slow) == {1, 3}
            assert abs(slow[3].since_step - 150) <= 4
            assert all(np.isfinite(value) for each in slow.values() for value in numbers(each))

    @pytest.mark.long
    def test_bins_that_one_rank_lost_are_not_compared(self) -> None:
        """All values stay finite."""
        for hole in (slice(70, 100), slice(70, 170)):
            for rank in (0, 1, 3):
                judge, found = streamed(Job.of(4, 300, seed=5).slow(1, 20, "data"), {rank: hole})
                last = judge.judge(final=True)

                assert (only(last).rank, only(last).until_step) == (1, None)
                assert only(last).excess_ns == pytest.approx(20 * MS, rel=0.15)
                for each in found:
                    assert np.isfinite(each.step_ns)
                    assert all(
                        np.isfinite(value)
                        for episode in each.episodes
                        for value in numbers(episode)
                    )
                    assert all(
                        np.isfinite([usual.work_ns, usual.wait_ns]).all() for usual in each.usual
                    )

    def test_bins_that_arrive_late_count_like_bins_in_time(self) -> None:
        job = self.job()
        judge = StragglerDetector()
        for rank in (0, 1, 2):
            judge.add_rows(rank, job.rows_of(rank))
        judge.add_rows(3, job.rows_of(3, slice(0, 100)))
        judge.judge()
        judge.add_rows(3, job.rows_of(3, slice(100, None)))
        late, whole = judge.judge(final=True), job.judge()

        assert only(late).excess_ns == pytest.approx(only(whole).excess_ns, rel=0.01)
        assert late.rows == whole.rows

    def test_other_ranks_are_judged_at_once_after_a_rank_ended(self) -> None:
        job = self.job()
        judge = StragglerDetector()
        for rank in range(4):
            judge.add_rows(rank, job.rows_of(rank, slice(0, 40 if rank == 3 else 80)))
        assert judge.judge().last_step == 39
        judge.end_rank(3)
        found = judge.judge()

        assert found.last_step == 79
        assert only(found).rank == 1

    def test_episode_of_an_ended_rank_ends_with_its_last_bin(self) -> None:
        job = self.job()
        judge = StragglerDetector()
        for rank in range(4):
            judge.add_rows(rank, job.rows_of(rank, slice(0, 120 if rank == 1 else 300)))
        assert only(judge.judge()).until_step is None
        judge.end_rank(1)
        found = only(judge.judge(final=True))

        assert (found.rank, found.last_step, found.until_step) == (1, 119, 120)
        assert judge.judge(final=True).compared == 3

    @pytest.mark.parametrize("fewer", [1, 3, 4])
    @pytest.mark.parametrize("short", [0, 1])
    def test_ranks_that_end_a_few_bins_apart_are_compared_to_the_end(
        self, short: int, fewer: int
    ) -> None:
        """The slow rank stays slow in the verdict, although bins of one rank are missing."""
        job = self.job()
        judge = StragglerDetector()
        for rank in range(4):
            judge.add_rows(rank, job.rows_of(rank, slice(0, 120 - (fewer if rank == short else 0))))
        judge.judge()
        for rank in range(4):  # `short` determines the order in which ranks end.
            judge.end_rank((short + rank) % 4)
            judge.judge()
        found = judge.judge(final=True)

        assert (only(found).rank, only(found).until_step) == (1, None)
        assert (found.compared, found.last_step) == (4, 119 - fewer)

    def test_ranks_with_different_bin_widths_are_compared_to_the_end(self) -> None:
        """The last bin of the ranks with wider bins is incomplete."""
        job = self.job()
        judge = StragglerDetector()
        for rank in range(4):
            judge.add_rows(
                rank,
                (
                    wider(job.rows_of(rank, slice(0, 122)), 2)
                    if rank != 1
                    else job.rows_of(1, slice(0, 121))
                ),
            )
            judge.end_rank(rank)
        found = judge.judge(final=True)

        assert (only(found).rank, only(found).until_step) == (1, None)
        assert found.compared == 4

    def test_steps_of_a_single_remaining_rank_do_not_change_the_comparison(self) -> None:
        job = Job.of(2, 300)
        judge = StragglerDetector()
        judge.add_rows(0, job.rows_of(0))
        judge.add_rows(1, job.rows_of(1, slice(0, 60)))
        before = judge.judge()
        judge.end_rank(1)
        found = judge.judge(final=True)

        assert (before.last_step, before.rows, before.compared) == (59, 56, 2)
        assert (found.last_step, found.rows, found.compared) == (59, 56, 2)

    def test_detector_that_starts_late_does_not_report_slowness_since_the_start(self) -> None:
        """A restarted sidecar starts a detector late."""
        job = Job.of(4, 200).slow(1, 20)
        judge = StragglerDetector()
        judge.add_bin_batch("", job.block(rows=slice(100, None)))
        found = only(judge.judge(final=True))

        assert (found.since_step, found.from_start) == (100, False)
        under_the_flag = StragglerDetector()
        under_the_flag.add_bin_batch("", job.block(rows=slice(1, None)))
        assert only(under_the_flag.judge(final=True)).from_start

    @pytest.mark.parametrize(
        "flag",
        [
            Flag.EVALUATION,
            Flag.SKIPPED,
            Flag.SAMPLED,
            Flag.CHECKPOINT,
            Flag.COMPILED,
            Flag.CAPTURED,
        ],
    )
    def test_step_with_other_work_on_one_rank_is_not_compared(self, flag: Flag) -> None:
        job = Job.of(4, 200)
        job.slow(1, 300, "host", slice(0, 200, 3)).flags[1, ::3] = flag
        found = job.judge()

        assert found.episodes == ()
        assert found.rows == sum(row % 3 > 0 for row in range(4, 200))
        job.flags[:] = Flag.COLLECTED | Flag.MANUAL | Flag.INFERENCE
        assert only(job.judge()).rank == 1

    def test_remaining_bins_are_judged_at_the_end(self) -> None:
        job = Job.of(2, 4 * EVERY + 3)
        judge = StragglerDetector()
        judge.add_bin_batch("", job.block())

        assert judge.judge().last_step == 4 * EVERY - 1
        assert judge.judge(final=True).last_step == 4 * EVERY + 2


def numbers(episode: Episode) -> list[float]:
    return [value for value in dataclasses.asdict(episode).values() if isinstance(value, float)]


class TestPopulations:
    def test_ranks_with_different_work_are_not_compared(self) -> None:
        """The usual work of each pipeline stage is reported."""
        judge = StragglerDetector()
        job = Job.of(8, 100)
        job.parts_ns[4:] *= 1.3
        for rank in range(8):
            judge.set_placement(rank, Placement("", f"stage{rank // 4}"))
            judge.add_rows(rank, job.rows_of(rank))
        found = judge.judge(final=True)

        assert found.episodes == ()
        assert found.compared == 8
        assert [(usual.population, usual.ranks) for usual in found.usual] == [
            ("stage0", "0-3"),
            ("stage1", "4-7"),
        ]
        assert found.usual[1].work_ns / found.usual[0].work_ns == pytest.approx(1.3, rel=0.02)
        assert found.usual[0].wait_ns == pytest.approx(0.3 * WORK_NS, rel=0.2)

    def test_rank_is_compared_only_within_its_pipeline_stage(self) -> None:
        """Ranks of the other stage are slower."""
        job = Job.of(8, 100).slow(2, 20, "optimizer")
        job.parts_ns[4:] *= 1.3
        judge = StragglerDetector()
        judge.add_bin_batch("a", job.block(range(4)))
        judge.add_bin_batch("b", job.block(range(4, 8)))

        assert only(judge.judge(final=True)).rank == 2

    def test_single_rank_of_a_pipeline_stage_is_not_compared(self) -> None:
        """The rank's usual times are still known."""
        judge = StragglerDetector()
        judge.add_bin_batch("a", Job.of(1, 100).block())
        found = judge.judge(final=True)

        assert (found.compared, found.episodes, found.detectable_ns) == (0, (), None)
        assert StragglerDetector().judge(final=True) == NOTHING


def test_excess_above_the_detectable_one_is_found_and_half_of_it_is_not() -> None:
    """No excess is detectable in few bins."""
    found = Job.of(4, 64, noise=0.05, seed=6).judge()
    assert MIN_SHARE * found.step_ns < found.detectable_ns < 0.2 * found.step_ns
    seen_ms = found.detectable_ns / MS

    assert only(Job.of(4, 64, noise=0.05, seed=6).slow(1, 1.5 * seen_ms).judge()).rank == 1
    assert Job.of(4, 64, noise=0.05, seed=6).slow(1, 0.5 * seen_ms).judge().episodes == ()
    assert Job.of(4, MIN_ROWS + 3, seed=6).judge().detectable_ns is None

    differing = Job.of(16, 100)
    for rank, excess_ms in enumerate(np.linspace(-15, 15, 16).tolist()):
        differing.slow(rank, excess_ms)
    seen_ms = differing.judge().detectable_ns / MS
    # A much smaller excess is detectable among similar ranks.
    assert seen_ms > 2 * 0.03 * WORK_NS / MS
    assert differing.slow(8, 0.8 * seen_ms).judge().episodes == ()
    assert only(differing.slow(8, 0.7 * seen_ms).judge()).rank == 8

    quiet = Job.of(4, 100, noise=0.0).judge()
    assert quiet.detectable_ns == pytest.approx(MIN_SHARE / (1 - MIN_SHARE) * quiet.step_ns)


def test_straggler_findings_are_unchanged_by_a_json_round_trip() -> None:
    judge = StragglerDetector()
    judge.add_bin_batch("a/pp0", Job.of(4, 100).slow(1, 20).block())
    for found in (judge.judge(final=True), NOTHING):
        assert save_and_load(found) == found
    assert len(judge.judge().episodes) == 1
