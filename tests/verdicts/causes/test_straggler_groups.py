"""From slow ranks to what they have in common: whole jobs are judged, and places say who belongs together."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.support.findings import episode, findings
from tests.support.planted import WORK_NS, Job, places
from tests.support.saved import saved
from torchlens_perf.verdicts.causes.straggler_groups import (
    MAX_EXPLAINED,
    stage_imbalance,
    straggler_groups,
    with_groups,
)
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Diagnosis, Findings, Usual
from torchlens_perf.verdicts.stragglers.placement import Placement

MS = 1e6


def test_a_slow_node() -> None:
    """Ranks of one host that are all slow are one group: the node, with the slowest of them in front."""
    job = Job.of(32, 100)
    for rank in range(8, 16):
        job.slow(rank, 30 + (rank == 11) * 10, "backward")
    (found,) = with_groups(job.judged(), places(32)).groups

    assert (found.kind, found.name, found.host) == ("node", "node-1", "node-1")
    assert (found.ranks, found.lead.rank) == (tuple(range(8, 16)), 11)


def test_what_a_node_costs() -> None:
    """A node costs what the job would gain without all of its ranks. Without one of them it would gain next to nothing:
    seven others are as slow. That survives plain JSON, and is told of its ranks when they are slow no more."""
    job, at = Job.of(32, 140), places(32)
    for rank in range(8, 16):
        job.slow(rank, 30, "backward", slice(20, 110))
    judge = StragglerDetector()
    for rank, place in at.items():
        judge.set_place(rank, place)
    judge.add_block("", job.block(rows=slice(0, 108)))
    found = judge.judge()
    named = saved(with_groups(found, at))
    (node,) = named.groups

    own_ns = job.parts_ns.sum(axis=2)[:, 20:108]
    without_ns = np.delete(own_ns, range(8, 16), axis=0)
    gain_ns = (own_ns.max(axis=0) - without_ns.max(axis=0)).mean()
    assert node.kind == "node"
    assert node.lead.cost_ns < 3 * MS
    assert node.cost_ns == pytest.approx(gain_ns, rel=0.02)
    assert node.cost_share == pytest.approx(gain_ns / node.lead.step_ns, rel=0.02)
    assert saved(found).episodes == found.episodes
    judge.add_block("", job.block(rows=slice(108, None)))
    ended = judge.judge(final=True).episodes
    assert len(ended) == 8
    assert all(each.until_step is not None for each in ended)
    assert [each.shared_cost_ns for each in ended] == pytest.approx([gain_ns] * 8, rel=0.1)


def test_what_a_node_costs_in_stages() -> None:
    """Of a node whose ranks belong to several populations, what the slowest of them costs; of a rank alone, its own."""
    job, at = Job.of(16, 80), {}
    judge = StragglerDetector()
    for rank in range(16):
        at[rank] = Placement(f"node-{rank // 4}", f"x/pp{rank % 2}", {"pp": rank % 2})
        judge.set_place(rank, at[rank])
        if rank // 4 == 1:
            job.slow(rank, 20 + 20 * (rank % 2), "backward")
        judge.add(rank, job.rows_of(rank))
    (node,) = with_groups(judge.judge(final=True), at).groups
    alone = with_groups(Job.of(4, 80).slow(1, 20).judged(), places(4)).groups[0]

    assert (node.kind, node.ranks) == ("node", (4, 5, 6, 7))
    assert node.cost_ns == pytest.approx(37 * MS, rel=0.1)
    assert alone.cost_ns == alone.lead.cost_ns == pytest.approx(20 * MS, rel=0.15)


def test_what_is_not_known_costs_nothing_known() -> None:
    """Ranks that were never judged together have no cost as a node, and are not last for that."""
    slow = [episode(rank, cost_ns=rank * MS) for rank in (8, 9, 11, 12, 14, 15)]
    node, rank = straggler_groups([*slow, episode(3, cost_ns=MS)], places(32))

    assert (node.kind, node.cost_ns, node.cost_share) == ("node", None, None)
    assert (rank.kind, rank.cost_ns) == ("rank", MS)


def test_modules_of_the_slowest() -> None:
    """Where the forward pass is slow, the modules that take longer there are kept, the largest three."""
    excess_ns = {"a": 1 * MS, "b": -2 * MS, "c": 5 * MS, "d": 3 * MS, "e": 4 * MS}
    slow = findings(episode(3, phase="forward"), episode(5))
    forward, backward = with_groups(slow, places(8), {3: excess_ns, 5: excess_ns}.__getitem__).groups

    assert forward.slower_modules_ns == {"c": 5 * MS, "e": 4 * MS, "d": 3 * MS}
    assert backward.slower_modules_ns == {}
    both = findings(groups=(forward, backward))
    assert saved(both) == both


def test_most_of_a_node() -> None:
    """Six of eight are the node; five are five ranks."""
    slow = [episode(rank) for rank in (8, 9, 11, 12, 14, 15)]
    (node,) = straggler_groups(slow, places(32))

    assert (node.kind, node.ranks) == ("node", (8, 9, 11, 12, 14, 15))
    assert [each.kind for each in straggler_groups(slow[1:], places(32))] == ["rank"] * 5


def test_no_node_without_others() -> None:
    """A job of one host has no slow node, and a host of one rank is that rank."""
    assert [each.kind for each in straggler_groups([episode(rank) for rank in range(8)], places(8))] == ["rank"] * 8
    (found,) = straggler_groups([episode(3)], places(8, node_size=1))
    assert (found.kind, found.host, found.ranks) == ("rank", "node-3", (3,))


def test_a_position() -> None:
    """Slow ranks that hold the same experts, on all nodes, are a position in the mesh."""
    job = Job.of(32, 100)
    ep = [rank % 8 for rank in range(32)]
    for rank in range(3, 32, 8):
        job.slow(rank, 30, "forward")
    (found,) = with_groups(job.judged(), places(32, ep=ep, dp=[rank // 8 for rank in range(32)])).groups

    assert (found.kind, found.name, found.ranks) == ("position", "ep 3", (3, 11, 19, 27))
    assert found.host == f"node-{found.lead.rank // 8}"


def test_stages_are_no_positions() -> None:
    """Pipeline stages do different work: those of one stage are not named together for that."""
    slow = [episode(rank) for rank in (0, 8, 16, 24)]

    assert {each.kind for each in straggler_groups(slow, places(32, pp=[rank % 8 for rank in range(32)]))} == {"rank"}


def test_a_node_comes_before_a_position() -> None:
    """Each slow rank is named once: with its node, if that is slow; what is left, by position or alone."""
    members = [*range(8, 16), 3, 19, 27, 20]
    found = straggler_groups([episode(rank) for rank in members], places(32, ep=[rank % 8 for rank in range(32)]))

    assert sorted((each.kind, each.ranks) for each in found) == [
        ("node", tuple(range(8, 16))), ("position", (3, 19, 27)), ("rank", (20,)),
    ]  # fmt: skip


def test_the_costliest_first() -> None:
    """By what they cost, then by their excess; of very many slow ranks it is asked why the first few are slow."""
    slow = [episode(rank, cost_ns=rank % 3 * MS, excess_ns=rank * MS) for rank in range(12)]
    why = Diagnosis((), ("garbage collection",), (), {}, {})
    found = with_groups(findings(*slow), places(12, node_size=100), diagnosed=lambda group: why).groups

    assert [each.lead.rank for each in found] == [11, 8, 5, 2, 10, 7, 4, 1, 9, 6, 3, 0]
    assert [each.diagnosis for each in found] == [why] * MAX_EXPLAINED + [None] * 4


def test_only_who_is_slow_now() -> None:
    """Episodes that are over name nobody, and two slow ranks of four are two."""
    assert with_groups(findings(episode(1, until=120)), places(8)).groups == ()
    job = Job.of(4, 150).slow(1, 20).slow(2, 20).slow(3, 20, rows=slice(0, 60))

    assert {each.ranks for each in with_groups(job.judged(), places(4)).groups} == {(1,), (2,)}


def test_why_a_rank_was_slow_is_kept() -> None:
    """When it is over, who looks back still learns why; until it is known no more that it was."""
    slow, why = episode(1), Diagnosis((), ("garbage collection",), (), {}, {})
    now = with_groups(findings(slow), places(8), diagnosed=lambda group: why)
    assert now.diagnosis(slow.key) is why
    over = with_groups(findings(dataclasses.replace(slow, until_step=120)), places(8), before=now)
    later = with_groups(
        findings(dataclasses.replace(slow, until_step=120)),
        places(8),
        before=saved(over),
    )

    assert over.groups == later.groups == ()
    assert later.diagnosis(slow.key) == why
    assert with_groups(findings(), places(8), before=later).diagnosis(slow.key) is None


def pipeline(*work: float, ranks: int = 4) -> tuple[Findings, dict[int, Placement]]:
    """A judged pipeline whose stages do so many times the usual work."""
    job = Job.of(ranks * len(work), 60)
    judge, at = StragglerDetector(), {}
    for stage, factor in enumerate(work):
        members = range(stage * ranks, (stage + 1) * ranks)
        job.parts_ns[list(members)] *= factor
        for rank in members:
            at[rank] = Placement("", f"x/pp{stage}", {"pp": stage})
            judge.set_place(rank, at[rank])
    for rank in range(job.ranks):
        judge.add(rank, job.rows_of(rank))
    return judge.judge(final=True), at


class TestImbalance:
    @pytest.mark.parametrize("ranks", [1, 4])
    def test_the_stage_with_the_most_work(self, ranks: int) -> None:
        """It is told with its ranks, its work and the others' mean; no rank is slow. Also with one rank a stage."""
        found, at = pipeline(1.0, 0.9, 1.4, 1.1, ranks=ranks)
        named = with_groups(found, at)

        assert named.groups == ()
        assert named.imbalance is not None
        assert named.imbalance.stage == "pp 2"
        assert named.imbalance.ranks == tuple(range(2 * ranks, 3 * ranks))
        assert named.imbalance.work_ns == pytest.approx(1.4 * WORK_NS, rel=0.02)
        assert named.imbalance.others_work_ns == pytest.approx(WORK_NS, rel=0.02)

    def test_what_balancing_gains(self) -> None:
        """The most work less the mean of all stages, its own included: with two stages, half the difference."""
        for work, gain in (((1.0, 1.5), 0.25), ((1.0, 0.9, 1.4, 1.1), 0.3)):
            found, at = pipeline(*work)
            imbalance = stage_imbalance(found, at)
            assert imbalance is not None
            assert imbalance.stages == len(work)
            assert imbalance.cost_ns == pytest.approx(gain * WORK_NS, rel=0.03)

    def test_less_than_a_tenth_is_none(self) -> None:
        """Stages are never quite alike: less than a tenth of the step is nothing to be told."""
        found, at = pipeline(1.0, 1.0, 1.08)

        assert stage_imbalance(found, at) is None

    def test_no_stages(self) -> None:
        """Populations for other reasons, a single stage, ranks of unknown place, or no step: no imbalance."""
        found, at = pipeline(1.0, 2.0)
        assert stage_imbalance(found, at) is not None
        assert stage_imbalance(found, {}) is None
        assert stage_imbalance(found, {rank: Placement("", "", {"dp": 0}) for rank in at}) is None
        assert stage_imbalance(found, {rank: Placement("", "", {"pp": 0}) for rank in at}) is None
        assert stage_imbalance(dataclasses.replace(found, step_ns=0.0), at) is None
        assert stage_imbalance(NOTHING, {}) is None

    def test_several_populations_of_a_stage(self) -> None:
        """A stage's ranks may do different work, too: its most counts, and all of its ranks are told."""
        usual = tuple(
            Usual(population, ranks, work * MS, 0.0)
            for population, ranks, work in (("a", "0-1", 100), ("b", "2-3", 160), ("c", "4-7", 100))
        )
        found = dataclasses.replace(NOTHING, usual=usual, step_ns=170 * MS)
        imbalance = stage_imbalance(found, places(8, stage=[0] * 4 + [1] * 4))

        assert imbalance is not None
        assert (imbalance.stage, imbalance.ranks, imbalance.work_ns) == ("stage 0", (0, 1, 2, 3), 160 * MS)


def test_json() -> None:
    """Who is named survives plain JSON: nobody, ranks and nodes, and an imbalance."""
    found, at = pipeline(1.0, 1.5)
    slow = [episode(rank) for rank in (1, 8, 9, 10)]
    both = findings(groups=tuple(straggler_groups(slow, places(16, node_size=4))))
    assert {each.kind for each in both.groups} == {"rank", "node"}
    for named in (NOTHING, both, with_groups(found, at)):
        assert saved(named) == named
