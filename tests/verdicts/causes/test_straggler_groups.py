"""Slow ranks grouped by node or position in the mesh, and imbalance between pipeline stages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.support.findings import episode, findings, shared
from tests.support.planted import WORK_NS, Job, places
from tests.support.saved import save_and_load
from torchlens_perf.verdicts.causes.straggler_groups import (
    MAX_EXPLAINED,
    add_straggler_groups,
    find_imbalance,
    find_straggler_groups,
)
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Diagnosis, Findings, UsualTimes
from torchlens_perf.verdicts.stragglers.placement import Placement

MS = 1e6


def test_slow_ranks_of_one_host_are_one_node_group() -> None:
    """The slowest rank leads the group."""
    job = Job.of(32, 100)
    for rank in range(8, 16):
        job.slow(rank, 30 + (rank == 11) * 10, "backward")
    (found,) = add_straggler_groups(job.judge(), places(32)).groups

    assert (found.kind, found.name, found.host) == ("node", "node-1", "node-1")
    assert (found.ranks, found.lead.rank) == (tuple(range(8, 16)), 11)


def test_cost_of_a_node_is_the_time_saved_without_all_of_its_ranks() -> None:
    """If only one of eight slow ranks became healthy, the job would hardly be faster."""
    job, at = Job.of(32, 140), places(32)
    for rank in range(8, 16):
        job.slow(rank, 30, "backward", slice(20, 110))
    judge = StragglerDetector()
    for rank, place in at.items():
        judge.set_placement(rank, place)
    judge.add_bin_batch("", job.block(rows=slice(0, 108)))
    found = judge.judge()
    named = save_and_load(add_straggler_groups(found, at))
    (node,) = named.groups

    own_ns = job.parts_ns.sum(axis=2)[:, 20:108]
    without_ns = np.delete(own_ns, range(8, 16), axis=0)
    gain_ns = (own_ns.max(axis=0) - without_ns.max(axis=0)).mean()
    assert node.kind == "node"
    assert node.lead.cost_ns < 3 * MS
    assert node.cost_ns == pytest.approx(gain_ns, rel=0.02)
    assert node.cost_share == pytest.approx(gain_ns / node.lead.step_ns, rel=0.02)
    assert save_and_load(found).episodes == found.episodes
    judge.add_bin_batch("", job.block(rows=slice(108, None)))
    ended = judge.judge(final=True).episodes
    assert len(ended) == 8
    assert all(each.until_step is not None for each in ended)
    assert [each.shared and each.shared.cost_ns for each in ended] == pytest.approx(
        [gain_ns] * 8, rel=0.1
    )


def test_cost_of_a_node_with_several_populations_is_the_highest_of_them() -> None:
    """A rank alone has its own cost."""
    job, at = Job.of(16, 80), {}
    judge = StragglerDetector()
    for rank in range(16):
        at[rank] = Placement(f"node-{rank // 4}", f"x/pp{rank % 2}", {"pp": rank % 2})
        judge.set_placement(rank, at[rank])
        if rank // 4 == 1:
            job.slow(rank, 20 + 20 * (rank % 2), "backward")
        judge.add_rows(rank, job.rows_of(rank))
    (node,) = add_straggler_groups(judge.judge(final=True), at).groups
    alone = add_straggler_groups(Job.of(4, 80).slow(1, 20).judge(), places(4)).groups[0]

    assert (node.kind, node.ranks) == ("node", (4, 5, 6, 7))
    assert node.cost_ns == pytest.approx(37 * MS, rel=0.1)
    assert alone.cost_ns == alone.lead.cost_ns == pytest.approx(20 * MS, rel=0.15)


def test_cost_of_a_node_with_ranks_never_compared_together_is_unknown() -> None:
    """The node is not sorted last because of the unknown cost."""
    slow = [episode(rank, cost_ns=rank * MS) for rank in (8, 9, 11, 12, 14, 15)]
    node, rank = find_straggler_groups([*slow, episode(3, cost_ns=MS)], places(32))

    assert (node.kind, node.cost_ns, node.cost_share) == ("node", None, None)
    assert (rank.kind, rank.cost_ns) == ("rank", MS)


def test_three_largest_slow_modules_are_kept_for_the_forward_pass() -> None:
    excess_ns = {"a": 1 * MS, "b": -2 * MS, "c": 5 * MS, "d": 3 * MS, "e": 4 * MS}
    slow = findings(episode(3, phase="forward"), episode(5))
    forward, backward = add_straggler_groups(
        slow, places(8), {3: excess_ns, 5: excess_ns}.__getitem__
    ).groups

    assert forward.slower_modules_ns == {"c": 5 * MS, "e": 4 * MS, "d": 3 * MS}
    assert backward.slower_modules_ns == {}
    both = findings(groups=(forward, backward))
    assert save_and_load(both) == both


def test_node_is_reported_if_three_quarters_of_its_ranks_are_slow() -> None:
    """Six slow ranks of eight are reported as a node, and five as single ranks."""
    slow = [episode(rank) for rank in (8, 9, 11, 12, 14, 15)]
    (node,) = find_straggler_groups(slow, places(32))

    assert (node.kind, node.ranks) == ("node", (8, 9, 11, 12, 14, 15))
    assert [each.kind for each in find_straggler_groups(slow[1:], places(32))] == ["rank"] * 5


def test_node_is_not_reported_in_a_job_of_one_host_or_for_one_rank() -> None:
    assert [
        each.kind for each in find_straggler_groups([episode(rank) for rank in range(8)], places(8))
    ] == ["rank"] * 8
    (found,) = find_straggler_groups([episode(3)], places(8, node_size=1))
    assert (found.kind, found.host, found.ranks) == ("rank", "node-3", (3,))


def test_slow_ranks_at_one_mesh_position_are_one_group() -> None:
    """The ranks have the same experts, on all nodes."""
    job = Job.of(32, 100)
    ep = [rank % 8 for rank in range(32)]
    for rank in range(3, 32, 8):
        job.slow(rank, 30, "forward")
    (found,) = add_straggler_groups(
        job.judge(), places(32, ep=ep, dp=[rank // 8 for rank in range(32)])
    ).groups

    assert (found.kind, found.name, found.ranks) == ("position", "ep 3", (3, 11, 19, 27))
    assert found.host == f"node-{found.lead.rank // 8}"


def test_slow_pipeline_stage_is_not_reported_as_a_mesh_position() -> None:
    slow = [episode(rank) for rank in (0, 8, 16, 24)]

    assert {
        each.kind
        for each in find_straggler_groups(slow, places(32, pp=[rank % 8 for rank in range(32)]))
    } == {"rank"}


def test_slow_rank_is_in_its_node_group_rather_than_in_a_position_group() -> None:
    members = [*range(8, 16), 3, 19, 27, 20]
    found = find_straggler_groups(
        [episode(rank) for rank in members], places(32, ep=[rank % 8 for rank in range(32)])
    )

    assert sorted((each.kind, each.ranks) for each in found) == [
        ("node", tuple(range(8, 16))), ("position", (3, 19, 27)), ("rank", (20,)),
    ]  # fmt: skip


def test_groups_are_ordered_by_cost_then_excess() -> None:
    """Only the first groups get a diagnosis."""
    slow = [episode(rank, cost_ns=rank % 3 * MS, excess_ns=rank * MS) for rank in range(12)]
    why = Diagnosis((), ("garbage collection",), (), {}, {})
    found = add_straggler_groups(
        findings(*slow), places(12, node_size=100), diagnosed=lambda group: why
    ).groups

    assert [each.lead.rank for each in found] == [11, 8, 5, 2, 10, 7, 4, 1, 9, 6, 3, 0]
    assert [each.diagnosis for each in found] == [why] * MAX_EXPLAINED + [None] * 4


def test_ranks_with_one_cost_have_one_share_of_the_step() -> None:
    """The share is of the steps since both are slow. Before, steps were shorter."""
    both = [
        episode(1, 20, shared=shared(30 * MS), step_ns=90 * MS),
        episode(2, 60, shared=shared(30 * MS), step_ns=120 * MS),
    ]
    found = find_straggler_groups(both, places(4))

    assert [each.slow_too for each in found] == [(2,), (1,)]
    assert [each.cost_share for each in found] == [0.25, 0.25]


def test_ended_episodes_belong_to_no_group() -> None:
    """Two slow ranks of four are two groups."""
    assert add_straggler_groups(findings(episode(1, until=120)), places(8)).groups == ()
    job = Job.of(4, 150).slow(1, 20).slow(2, 20).slow(3, 20, rows=slice(0, 60))

    assert {each.ranks for each in add_straggler_groups(job.judge(), places(4)).groups} == {
        (1,),
        (2,),
    }


def test_diagnosis_is_kept_after_the_end_of_an_episode() -> None:
    """The diagnosis is dropped together with the episode."""
    slow, why = episode(1), Diagnosis((), ("garbage collection",), (), {}, {})
    now = add_straggler_groups(findings(slow), places(8), diagnosed=lambda group: why)
    assert now.diagnosis(slow.key) is why
    over = add_straggler_groups(
        findings(dataclasses.replace(slow, until_step=120)), places(8), before=now
    )
    later = add_straggler_groups(
        findings(dataclasses.replace(slow, until_step=120)),
        places(8),
        before=save_and_load(over),
    )

    assert over.groups == later.groups == ()
    assert later.diagnosis(slow.key) == why
    assert add_straggler_groups(findings(), places(8), before=later).diagnosis(slow.key) is None


def pipeline(*work: float, ranks: int = 4) -> tuple[Findings, dict[int, Placement]]:
    """Return a judged pipeline. Each argument is the factor on the usual work of one stage."""
    job = Job.of(ranks * len(work), 60)
    judge, at = StragglerDetector(), {}
    for stage, factor in enumerate(work):
        members = range(stage * ranks, (stage + 1) * ranks)
        job.parts_ns[list(members)] *= factor
        for rank in members:
            at[rank] = Placement("", f"x/pp{stage}", {"pp": stage})
            judge.set_placement(rank, at[rank])
    for rank in range(job.ranks):
        judge.add_rows(rank, job.rows_of(rank))
    return judge.judge(final=True), at


class TestImbalance:
    @pytest.mark.parametrize("ranks", [1, 4])
    def test_imbalance_has_the_stage_with_the_most_work(self, ranks: int) -> None:
        """No rank is slow. Stages with a single rank are compared as well."""
        found, at = pipeline(1.0, 0.9, 1.4, 1.1, ranks=ranks)
        named = add_straggler_groups(found, at)

        assert named.groups == ()
        assert named.imbalance is not None
        assert named.imbalance.stage == "pp 2"
        assert named.imbalance.ranks == tuple(range(2 * ranks, 3 * ranks))
        assert named.imbalance.work_ns == pytest.approx(1.4 * WORK_NS, rel=0.02)
        assert named.imbalance.others_work_ns == pytest.approx(WORK_NS, rel=0.02)

    def test_cost_of_an_imbalance_is_the_excess_over_the_mean_of_all_stages(self) -> None:
        """With two stages, the cost is half of their difference."""
        for work, gain in (((1.0, 1.5), 0.25), ((1.0, 0.9, 1.4, 1.1), 0.3)):
            found, at = pipeline(*work)
            imbalance = find_imbalance(found, at)
            assert imbalance is not None
            assert imbalance.stages == len(work)
            assert imbalance.cost_ns == pytest.approx(gain * WORK_NS, rel=0.03)

    def test_difference_below_a_tenth_of_the_step_is_no_imbalance(self) -> None:
        found, at = pipeline(1.0, 1.0, 1.08)

        assert find_imbalance(found, at) is None

    def test_no_imbalance_without_two_stages_known_ranks_and_steps(self) -> None:
        found, at = pipeline(1.0, 2.0)
        assert find_imbalance(found, at) is not None
        assert find_imbalance(found, {}) is None
        assert find_imbalance(found, {rank: Placement("", "", {"dp": 0}) for rank in at}) is None
        assert find_imbalance(found, {rank: Placement("", "", {"pp": 0}) for rank in at}) is None
        assert find_imbalance(dataclasses.replace(found, step_ns=0.0), at) is None
        assert find_imbalance(NOTHING, {}) is None

    def test_stage_with_several_populations_counts_its_largest_work(self) -> None:
        """All ranks of the stage are listed."""
        usual = tuple(
            UsualTimes(population, ranks, work * MS, 0.0)
            for population, ranks, work in (("a", "0-1", 100), ("b", "2-3", 160), ("c", "4-7", 100))
        )
        found = dataclasses.replace(NOTHING, usual=usual, step_ns=170 * MS)
        imbalance = find_imbalance(found, places(8, stage=[0] * 4 + [1] * 4))

        assert imbalance is not None
        assert (imbalance.stage, imbalance.ranks, imbalance.work_ns) == (
            "stage 0",
            (0, 1, 2, 3),
            160 * MS,
        )


def test_groups_and_imbalance_are_unchanged_by_a_json_round_trip() -> None:
    found, at = pipeline(1.0, 1.5)
    slow = [episode(rank) for rank in (1, 8, 9, 10)]
    both = findings(groups=tuple(find_straggler_groups(slow, places(16, node_size=4))))
    assert {each.kind for each in both.groups} == {"rank", "node"}
    for named in (NOTHING, both, add_straggler_groups(found, at)):
        assert save_and_load(named) == named
