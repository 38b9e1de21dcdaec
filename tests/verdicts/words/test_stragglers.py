"""Sentences on slow ranks, with their numbers and the next action."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.findings import episode, findings, shared
from tests.support.planted import places
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.causes.straggler_groups import (
    add_straggler_groups,
    find_straggler_groups,
)
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import (
    NOTHING,
    StageImbalance,
    StragglerGroup,
    UsualTimes,
    cause_class,
)
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.stragglers.placement import BY_DEVICE
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.evidence import NoSlowRankEvidence
from torchlens_perf.verdicts.words.phases import phase_name
from torchlens_perf.verdicts.words.stragglers import (
    MAX_PAST,
    SlowRankContext,
    build_no_straggler_verdict,
    build_straggler_verdicts,
    compute_last_arrival_shares,
)

MS = 1e6
REPORT: dict[str, Any] = {
    "run": {
        "device": None,
        "judged_by": "host",
        "ranks_seen": 2,
        "world_size": 2,
        "live": False,
    },
    "steps": {"count": 200},
    "ranks": [],
}
CONTEXT = SlowRankContext(())
AT = places(8, node_size=4)
OTHERWISE = "The kernel times of collectives do not confirm it"


def verdict_on(slow: Episode, context: SlowRankContext = CONTEXT, **changed: Any) -> Verdict:
    """Return the verdict on one slow rank."""
    found = findings(slow, **changed)
    (now,), before = build_straggler_verdicts(context, add_straggler_groups(found, AT))
    assert before == []
    return now


def module(
    title: str, forward: dict[str, float], backward: dict[str, float] | None = None
) -> dict[str, Any]:
    """Return a module's row of the report, with seconds per step by rank."""
    return {"name": title, "by_rank": forward, "backward_by_rank": backward or {}}


def test_sentence_on_a_slow_rank_has_phase_times_cost_and_action() -> None:
    """The order is rank, phase, times, cost, first step and action."""
    verdict = verdict_on(episode())

    assert (
        verdict.sentence
        == "Rank 3 (node-0) is slow in the backward pass: it computes 80.0 ms per step, the other"
        " ranks 60.0 ms. It costs the job 15.0 ms a step (15%), since step 100. Next: compare"
        " the input sizes of the model on rank 3 with other ranks', then the clock speed and"
        " other processes of its host."
    )
    assert (verdict.kind, verdict.rank, verdict.phase, verdict.since_step) == (
        "straggler",
        3,
        "backward",
        100,
    )
    assert (verdict.cost_s_per_step, verdict.cost_share) == pytest.approx((0.015, 0.15))
    assert verdict.evidence.excess_s == pytest.approx(0.02)
    assert (verdict.evidence.scope, verdict.evidence.ranks) == ("rank", (3,))


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ({3: 0.1, 5: 0.8}, f"{OTHERWISE}: rank 5 arrived last in 80% of them, rank 3 in 10%."),
        ({3: 0.9, 5: 0.1}, ""), ({3: 0.45, 5: 0.55}, ""), ({}, ""),
    ],
)  # fmt: skip
def test_verdict_is_doubted_if_another_rank_is_last_to_arrive(
    last: dict[int, float], said: str
) -> None:
    """Host times of collectives cannot raise doubt, because the host's judgement uses the same
    waits.
    """
    usual = verdict_on(episode())
    held = verdict_on(episode(), SlowRankContext((), "GPU", "device", last))

    assert held.sentence == (
        usual.sentence.replace(" Next:", f" {said} Next:") if said else usual.sentence
    )
    assert held.confidence == pytest.approx(usual.confidence / (2 if said else 1))
    assert verdict_on(episode(), SlowRankContext((), None, "host", last)).text == usual.text


def test_last_arrivals_count_only_for_enough_collectives_joined_by_kernels() -> None:

    def row(
        joined: int, last: dict[str, int], *, whole: bool = True, by_device: int = 10
    ) -> dict[str, Any]:
        by_rank = {rank: {"last": count} for rank, count in last.items()}
        return {
            "joined": joined,
            "joined_whole": whole,
            "by_device": by_device,
            "ended": 10,
            "by_rank": by_rank,
        }

    rows: Any = [row(30, {"0": 6, "1": 24}), row(10, {"0": 10}), row(99, {"0": 99}, whole=False)]
    assert compute_last_arrival_shares(rows) == pytest.approx({0: 0.4, 1: 0.6})
    assert compute_last_arrival_shares(
        [*rows, row(99, {"0": 99}, by_device=0)]
    ) == compute_last_arrival_shares(rows)
    assert compute_last_arrival_shares(rows[1:]) == {}


def test_location_of_a_slow_rank_has_the_name_of_its_host_or_node() -> None:
    at = {rank: dataclasses.replace(place, location="switch leaf3") for rank, place in AT.items()}
    slow = [episode(rank, shared=shared(15 * MS)) for rank in range(4)]
    (one,), _ = build_straggler_verdicts(CONTEXT, add_straggler_groups(findings(episode()), at))
    (node,), _ = build_straggler_verdicts(CONTEXT, add_straggler_groups(findings(*slow), at))

    assert one.sentence.startswith("Rank 3 (node-0, switch leaf3) is slow")
    assert node.sentence.startswith("Node node-0 (switch leaf3) is slow (ranks 0-3)")


def test_sentence_on_a_rank_slow_since_the_start_has_no_step_and_no_unknown_host() -> None:
    found = findings(episode(1, from_start=True), compared=2)
    (verdict,), _ = build_straggler_verdicts(CONTEXT, add_straggler_groups(found, {}))

    assert verdict.sentence.startswith("Rank 1 is slow in")
    assert ", the other rank 60.0 ms. " in verdict.sentence
    assert "(15%), since the start. Next:" in verdict.sentence


@pytest.mark.parametrize(
    ("phase", "words", "next_words", "cause"),
    [
        ("data", "in data loading:", "look at rank 3's loader", "slow_data"),
        (
            "forward",
            "in the forward pass:",
            "compare the input sizes of the model on rank 3",
            "slow_compute",
        ),
        (
            "recompute",
            "in recomputing activations:",
            "compare the input sizes and the clock speed of rank 3",
            "slow_compute",
        ),
        (
            "backward",
            "in the backward pass:",
            "compare the input sizes of the model on rank 3",
            "slow_compute",
        ),
        (
            "compute",
            "in computing (forward and backward):",
            "compare the input sizes of the model on rank 3",
            "slow_compute",
        ),
        ("optimizer", "in the optimizer:", "holds more parameters", "slow_compute"),
        (
            "host",
            "in host code:",
            "logging, checkpoints, .item(), garbage",
            "slow_host",
        ),
        ("cpu", "in CPU contention:", "what else runs on rank 3's CPUs", "slow_host"),
    ],
)
def test_phase_determines_words_class_and_action(
    phase: str, words: str, next_words: str, cause: str
) -> None:
    verdict = verdict_on(episode(phase=phase))

    assert words in verdict.sentence
    assert next_words in verdict.action
    assert verdict.evidence.cause == cause_class(episode(phase=phase)) == cause


def test_every_phase_of_a_straggler_has_words() -> None:
    assert (
        len({phase_name(phase) for phase in (*OWN_PARTS, "compute", "cpu")}) == len(OWN_PARTS) + 2
    )


def test_lack_of_a_cpu_is_described_as_time_without_a_cpu() -> None:
    text = verdict_on(episode(phase="cpu")).sentence

    assert (
        "its thread was runnable but had no CPU for 20.0 ms a step more than on the other ranks"
        in text
    )
    assert "computes" not in text


def test_intermittent_slowness_has_its_share_of_steps() -> None:
    seldom = verdict_on(episode(slow_share=0.286, slow_excess_ns=70 * MS)).sentence

    assert "; it comes and goes: +70.0 ms in 29% of steps." in seldom
    assert "comes and goes" not in verdict_on(episode(slow_share=0.7)).sentence


def test_larger_workload_changes_sentence_class_and_action() -> None:
    verdict = verdict_on(episode(more_workload=0.42))

    assert "; its workload is 42% larger than the others'." in verdict.sentence
    assert "Next: balance the batches: rank 3 gets longer sequences" in verdict.sentence
    assert verdict.evidence.cause == "more_work"
    assert "more to do" not in verdict_on(episode(more_workload=0.04)).sentence


class TestModules:
    def context(self, *modules: dict[str, Any]) -> SlowRankContext:
        return SlowRankContext(modules)

    def test_module_with_most_of_the_excess_is_mentioned(self) -> None:
        others = {str(rank): 0.010 for rank in range(8)}
        context = self.context(
            module("embed", {**others, "3": 0.011}),
            module("block", {**others, "3": 0.025}, {**others, "3": 0.009}),
            module("head", {"0": 0.5}),
        )
        verdict = verdict_on(episode(phase="forward"), context)

        assert "; most of the difference is in block (+15.0 ms a step). " in verdict.sentence
        assert "Next: compare the input sizes of block on rank 3" in verdict.sentence
        assert verdict.evidence.modules == ("block",)
        assert verdict.evidence.module_excess_s == pytest.approx(0.015)

    def test_module_excess_larger_than_the_phase_excess_is_not_shown(self) -> None:
        """Times of modules cover the whole run and contain lack of a CPU.

        The module's excess of 49 ms cannot be part of the phase's excess of 18 ms.
        """
        others = {str(rank): 0.010 for rank in range(8)}
        verdict = verdict_on(
            episode(phase="forward"), self.context(module("block", {**others, "3": 0.059}))
        )

        assert "; most of the difference is in block. It costs the job" in verdict.sentence
        assert "49" not in verdict.sentence

    def test_fewest_modules_that_explain_most_of_the_excess_are_mentioned(self) -> None:
        """In the phase "compute", forward and backward are added."""
        context = self.context(
            module("a", {"3": 0.004, "1": 0.001}, {"3": 0.006, "1": 0.003}),
            module("b", {"3": 0.004, "1": 0.001}, {"3": 0.008, "1": 0.003}),
            module("c", {"3": 0.001, "1": 0.001}),
        )
        verdict = verdict_on(episode(phase="compute"), context)

        assert verdict.evidence.modules == ("b", "a")
        assert verdict.evidence.module_excess_s == pytest.approx(0.014)
        assert verdict_on(episode(phase="backward"), context).evidence.modules == ()

    def test_module_whose_times_differ_between_other_ranks_is_not_mentioned(self) -> None:
        """The other ranks take 10 to 26 ms in the module, so 30 ms may be chance."""
        varying = {"3": 0.030, "0": 0.010, "1": 0.014, "2": 0.026}
        alike = {"3": 0.030, "0": 0.010, "1": 0.011, "2": 0.012}
        slow = episode(phase="backward")

        assert verdict_on(slow, self.context(module("a", {}, varying))).evidence.modules == ()
        assert verdict_on(slow, self.context(module("a", {}, alike))).evidence.modules == ("a",)

    def test_excess_in_no_module_is_between_modules(self) -> None:
        """The backward pass of the rank takes 20 ms longer, and its modules 2 ms."""
        context = self.context(
            module("a", {}, {"3": 0.021, "0": 0.020, "1": 0.020}),
            module("b", {}, {"3": 0.031, "0": 0.030, "1": 0.030}),
        )
        verdict = verdict_on(episode(phase="backward", since=40), context)

        assert "; most of the difference is between modules. It costs" in verdict.sentence
        assert "compare the input sizes of the code between its modules on rank 3" in verdict.action
        # Typical steps of the whole run do not show a late or an intermittent excess.
        late, rare = episode(since=120), episode(since=40, slow_share=0.3)
        for each in (late, rare):
            assert "between modules" not in verdict_on(each, context).sentence
        assert "between modules" not in verdict_on(episode(phase="backward")).sentence
        assert "between modules" not in verdict_on(episode(phase="data"), context).sentence

    def test_modules_with_little_excess_are_not_mentioned(self) -> None:
        context = self.context(module("a", {"3": 0.012, "1": 0.010}))

        assert verdict_on(episode(phase="forward"), context).evidence.modules == ()
        assert verdict_on(episode(phase="data"), context).evidence.modules == ()


class TestModulesOnDevices:
    """Modules of a rank that is judged by its device.

    Host times of modules depend on where the device's queue was full.
    """

    @staticmethod
    def named(
        excess_s: dict[str, float], phase: str = "forward", **changed: Any
    ) -> tuple[str, ...]:
        """Return the modules in the sentence.

        `excess_s` has the excess of own device time by module; "Net" is the whole model.
        """
        modules = [
            module(name, {"3": 0.11 if name == "c" else 0.01, "1": 0.01}, {"3": 0.11, "1": 0.01})
            | {"is_root": name == "Net", "device_own_by_rank": {"1": 0.01, "3": 0.01 + more_s}}
            for name, more_s in {**dict.fromkeys(("Net", *"abcde"), 0.0), **excess_s}.items()
        ]
        context = SlowRankContext(modules, "cuda", DEVICE)
        return verdict_on(episode(phase=phase, **changed), context).evidence.modules

    def test_modules_with_excess_of_own_device_time_are_mentioned(self) -> None:
        assert self.named({"b": 0.018}) == ("b",)
        assert self.named({"a": 0.010, "b": 0.008}) == ("a", "b")

    def test_whole_model_is_not_mentioned_as_a_module(self) -> None:
        assert self.named({"Net": 0.018}) == ()

    def test_no_module_is_mentioned_if_all_are_equally_slower(self) -> None:
        assert self.named(dict.fromkeys("abcde", 0.004)) == ()

    def test_no_module_is_mentioned_for_backward_passes_on_a_device(self) -> None:
        assert self.named({"b": 0.018}, phase="backward") == ()

    def test_host_times_of_modules_count_if_hosts_are_compared(self) -> None:
        assert self.named(
            {"b": 0.018}, by_host=True, excess_ns=150 * MS, phase_excess_ns=150 * MS
        ) == ("c",)


def test_slow_host_has_a_different_sentence_class_and_action() -> None:
    slow = verdict_on(episode(phase="forward", by_host=True))

    assert (
        "its host needs 80.0 ms a step against 60.0 ms on the other ranks, and the device waits for"
        " it. " in slow.sentence
    )
    assert (
        "Next: compare the host of rank 3: its CPU's clock, what else runs there, and what its"
        " Python code" in slow.sentence
    )
    assert slow.evidence.cause == "slow_host"
    assert verdict_on(episode(phase="forward")).evidence.cause == "slow_compute"


def test_sentence_on_a_node_or_position_has_its_slowest_rank() -> None:
    slow = [episode(rank, excess_ns=rank * MS) for rank in range(4, 8)]
    (node,), _ = build_straggler_verdicts(
        CONTEXT, findings(*slow, groups=tuple(find_straggler_groups(slow, AT)))
    )
    experts = places(8, node_size=4, ep=[rank % 4 for rank in range(8)])
    slow = [episode(2), episode(6)]
    together = findings(*slow, groups=tuple(find_straggler_groups(slow, experts)))
    (position,), _ = build_straggler_verdicts(CONTEXT, together)

    assert node.sentence.startswith(
        "Node node-1 is slow (ranks 4-7), most of all rank 7, in the backward pass: "
    )
    assert (
        "Next: look at node-1: clocks, temperature, power cap, other jobs; then run without it."
        in node.sentence
    )
    assert (node.evidence.scope, node.evidence.ranks) == ("node", (4, 5, 6, 7))
    assert position.sentence.startswith("The ranks at ep 2 are slow (2,6), most of all rank 2,")
    assert "Next: compare the work of the ranks at ep 2: tokens per expert" in position.sentence
    assert position.evidence.cause == "imbalance"


def test_cost_of_a_node_is_shared_or_unknown() -> None:
    """After the end of the episodes, the cost is reported for each rank."""
    known = [episode(rank, cost_ns=0.4 * MS, shared=shared(19 * MS)) for rank in range(4, 8)]
    unknown = [episode(rank, cost_ns=0.4 * MS) for rank in range(4, 8)]
    (told,), _ = build_straggler_verdicts(CONTEXT, add_straggler_groups(findings(*known), AT))
    (not_told,), _ = build_straggler_verdicts(CONTEXT, add_straggler_groups(findings(*unknown), AT))
    over = findings(episode(4, until=200, cost_ns=0.4 * MS, shared=shared(19 * MS)))
    _, (was,) = build_straggler_verdicts(CONTEXT, add_straggler_groups(over, AT))

    assert "It costs the job 19.0 ms a step (19%), since step 100." in told.sentence
    assert (told.cost_s_per_step, told.cost_share) == pytest.approx((0.019, 0.19))
    assert "Its cost to the job is not known, since step 100." in not_told.sentence
    assert (not_told.cost_s_per_step, not_told.cost_share) == (None, None)
    assert (
        "which cost the job 19.0 ms a step (19%), together with ranks slow at that time. It is"
        " over: no action is needed unless" in was.sentence
    )
    assert (was.cost_s_per_step, was.cost_share) == pytest.approx((0.019, 0.19))


def test_sentences_on_several_slow_ranks_have_the_shared_cost() -> None:
    slow = [
        episode(rank, excess_ns=(20 + rank) * MS, shared=shared(12 * MS, (rank - 1) * MS))
        for rank in (1, 4, 6)
    ]
    found = findings(*slow)
    now, _ = build_straggler_verdicts(CONTEXT, add_straggler_groups(found, AT))
    pair, _ = build_straggler_verdicts(CONTEXT, add_straggler_groups(findings(*slow[:2]), AT))

    assert [verdict.rank for verdict in now] == [6, 4, 1]
    assert (
        "Together with ranks 1,4 it costs the job 12.0 ms a step (12%), since step 100."
        in now[0].sentence
    )
    assert "Together with rank 4 it costs the job 12.0 ms a step (12%)" in pair[1].sentence
    assert " since step 100. Repairing only this rank gains 5.00 ms a step." in now[0].sentence
    assert now[2].explanation.endswith("; repairing only this rank gains nothing.")
    assert "Repairing" not in verdict_on(episode()).sentence
    assert [verdict.evidence.slow_too for verdict in now] == [(1, 4), (1, 6), (4, 6)]
    assert [(each.cost_s_per_step, each.cost_share) for each in now] == [
        pytest.approx((0.012, 0.12))
    ] * 3


def test_slow_ranks_with_different_work_have_separate_costs() -> None:
    at = {rank: dataclasses.replace(place, population=str(rank % 2)) for rank, place in AT.items()}
    found = findings(episode(1), episode(4, cost_ns=5 * MS))
    now, _ = build_straggler_verdicts(CONTEXT, add_straggler_groups(found, at))

    assert ["It costs the job" in verdict.sentence for verdict in now] == [True, True]
    assert [verdict.cost_s_per_step for verdict in now] == pytest.approx([0.015, 0.005])


def test_module_excess_from_another_node_is_used_if_the_report_has_none() -> None:
    """A module excess from another node must also explain the excess of the rank."""
    slow = findings(episode(phase="forward"))
    told = add_straggler_groups(slow, AT, lambda rank: {"layers.7": 15 * MS, "head": 2 * MS})
    elsewhere = SlowRankContext([module("layers.7", {"0": 0.01, "1": 0.01})])
    here = SlowRankContext([module("layers.2", {"3": 0.03, "0": 0.01, "1": 0.01})])
    little = add_straggler_groups(slow, AT, lambda rank: {"layers.7": 5 * MS})
    verdicts = [build_straggler_verdicts(*given)[0][0] for given in (
        (elsewhere, told), (here, told), (elsewhere, little),
    )]  # fmt: skip

    assert "most of the difference is in layers.7 (+15.0 ms a step)" in verdicts[0].sentence
    assert "Next: compare the input sizes of layers.7 on rank 3" in verdicts[0].sentence
    assert [verdict.evidence.modules for verdict in verdicts] == [("layers.7",), ("layers.2",), ()]


def test_sentence_on_an_imbalance_has_the_stage_with_most_work() -> None:
    imbalance = StageImbalance("pp 2", (8, 9, 10, 11), 140 * MS, 100 * MS, stages=4)
    (verdict,), _ = build_straggler_verdicts(
        CONTEXT, findings(step_ns=160 * MS, imbalance=imbalance)
    )

    assert (
        verdict.sentence
        == "The pipeline is out of balance: stage pp 2 (ranks 8-11) has 140 ms of work a step, the"
        " other stages 100 ms. Next: move layers out of stage pp 2."
    )
    assert (verdict.kind, verdict.rank) == ("imbalance", None)
    assert (verdict.cost_s_per_step, verdict.cost_share) == pytest.approx((0.03, 0.1875))


def test_ended_episode_below_the_smallest_detectable_slowdown_has_no_verdict() -> None:
    """The verdict that no rank is slow states this limit."""
    over = [
        episode(1, 20, until=70, excess_ns=2.9 * MS, cost_ns=2.9 * MS),
        episode(2, 20, until=70),
    ]
    _, before = build_straggler_verdicts(CONTEXT, findings(*over, detectable_ns=3 * MS))

    assert [verdict.rank for verdict in before] == [2]


def test_ended_episodes_follow_open_ones_newest_first() -> None:
    """A short ended episode is called transient."""
    slow = [
        episode(5, 150),
        episode(1, 20, until=45),
        episode(2, 60, until=110),
        episode(3, 0, 70, from_start=True),
    ]
    now, before = build_straggler_verdicts(CONTEXT, add_straggler_groups(findings(*slow), AT))

    assert [verdict.rank for verdict in now] == [5]
    assert [verdict.rank for verdict in before] == [2, 1, 3]
    assert [verdict.kind for verdict in before] == [
        "straggler_ended",
        "straggler_transient",
        "straggler_ended",
    ]
    assert (
        before[0].sentence
        == "Rank 2 was slow in the backward pass from step 60 to step 109: 20.0 ms more a step, which"
        " cost the job 15.0 ms a step (15%). It is over:"
        " no action is needed unless it returns."
    )
    assert "from the start to step 69" in before[2].sentence
    assert before[0].evidence.until_step == 110


def test_number_of_straggler_verdicts_is_limited() -> None:
    """The costliest slow ranks and the newest ended episodes are kept."""
    slow = [episode(rank, cost_ns=rank * MS) for rank in range(6)]
    over = [episode(rank, since=rank * 10, until=rank * 10 + 5) for rank in range(MAX_PAST + 2)]
    lone = tuple(StragglerGroup("rank", "", (each.rank,), each) for each in reversed(slow))
    now, before = build_straggler_verdicts(CONTEXT, findings(*slow, *over, groups=lone))

    assert [verdict.rank for verdict in now] == [5, 4, 3, 2]
    assert [verdict.rank for verdict in before] == list(range(MAX_PAST + 1, 1, -1))


def test_confidence_is_one_half_at_the_threshold_and_grows_above() -> None:
    told = [verdict_on(episode(z_score=z_score)).confidence for z_score in (0.0, 5.0, 10.0, 100.0)]

    assert told[:2] == [0.5, 0.5]
    assert told[2] == pytest.approx(0.875)
    assert 0.99 < told[3] < 1


def test_cost_share_is_zero_if_the_step_time_is_unknown() -> None:
    assert verdict_on(episode(step_ns=0.0)).cost_share == 0.0
    assert build_no_straggler_verdict(REPORT, findings(step_ns=0.0)).sentence.startswith(
        "No slow rank in 200 steps. The smallest detectable slowdown is 3.00 ms per step (0.0%)."
    )


class TestNoSlowRank:
    def test_verdict_without_slow_ranks_has_the_smallest_detectable_slowdown(self) -> None:
        verdict = build_no_straggler_verdict(REPORT, findings())

        assert (
            verdict.sentence
            == "No slow rank in 200 steps. The smallest detectable slowdown is 3.00 ms per step"
            " (3.0% of a step of 100 ms)."
        )
        assert verdict.evidence == NoSlowRankEvidence(
            detectable_s=0.003, compared=8, steps=200, step_s=0.1, by="host"
        )
        assert verdict.kind == "none"

    def test_too_few_steps_are_reported_with_the_needed_number(self) -> None:
        for found in (NOTHING, findings(detectable_ns=None)):
            verdict = build_no_straggler_verdict({**REPORT, "steps": {"count": 12}}, found)
            assert verdict.sentence.startswith("Too few steps to compare the ranks (12): ")
            assert "Next: run at least 40 steps." in verdict.sentence
            assert verdict.confidence == 0.0

    def test_more_steps_are_needed_if_steps_are_short(self) -> None:
        """Several short steps make one step bin."""
        text = build_no_straggler_verdict(
            {**REPORT, "steps": {"count": 60}}, dataclasses.replace(NOTHING, steps_needed=160)
        ).sentence

        assert text.startswith("Too few steps to compare the ranks (60): ")
        assert "Next: run at least 160 steps." in text
        enough = build_no_straggler_verdict(
            REPORT, dataclasses.replace(NOTHING, steps_needed=160)
        ).sentence
        assert enough.startswith("The ranks were not compared")

    def test_ranks_never_compared_are_reported_without_asking_for_more_steps(self) -> None:
        text = build_no_straggler_verdict(REPORT, NOTHING).sentence

        assert text.startswith("The ranks were not compared")
        assert "40 steps" not in text

    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            (
                [("0", 4, 44), ("1", 40, 5)],
                "Rank 1 has 40.0 ms of work a step, rank 0 has 4.00 ms and waits 44.0 ms.",
            ),
            (
                [("0-3", 30, 70), ("4-7", 90, 8), ("8-11", 50, 50)],
                (
                    "Ranks 4-7 have 90.0 ms of work a step, ranks 8-11, 0-3 have 40.0 ms and wait"
                    " 60.0 ms, on average."
                ),
            ),
            (
                [(str(2 * each), 10, 80) for each in range(20)] + [("1", 90, 0)],
                (
                    "Rank 1 has 90.0 ms of work a step, the others have 10.0 ms and wait 80.0 ms,"
                    " on average."
                ),
            ),
            ([("0", 4, 4), ("1", 40, 5)], ""),  # The other rank does not wait.
            ([("0", 40, 9), ("1", 42, 8)], ""),  # Nearly equal work.
            ([("0", 4, 44)], ""),
        ],
    )
    def test_ranks_with_different_models_are_reported_with_their_work(
        self, parts: list[tuple[str, float, float]], expected: str
    ) -> None:
        """No rank is called slow."""
        usual = tuple(
            UsualTimes(f"m{ranks}", ranks, work * MS, wait * MS) for ranks, work, wait in parts
        )
        found = dataclasses.replace(NOTHING, usual=usual, step_ns=50 * MS)
        text = build_no_straggler_verdict(REPORT, found).sentence
        if expected:
            assert expected in text
            assert text.startswith(
                "The ranks were not compared, because they run different models. "
            )
        else:
            assert (
                text
                == "The ranks were not compared: they do different work, or were not recorded at"
                " the same time. Next: nothing if the ranks are meant to differ; else start all ranks"
                " with the same script."
            )
        mixed = (*usual[:-1], dataclasses.replace(usual[-1], population=f"m{BY_DEVICE}"))
        if len(usual) > 1:
            assert (
                "of work a step"
                not in build_no_straggler_verdict(
                    REPORT, dataclasses.replace(found, usual=mixed)
                ).sentence
            )


def with_code(
    *gaps_ms: dict[str, float], lines: dict[str, int] | None = None, slow: int = 3
) -> SlowRankContext:
    """Return a context with the host code of ranks, by place. lines: stack samples of the slow rank."""
    rows: list[Any] = [
        {
            "rank": rank,
            "host_gaps": {gap: ms / 1e3 for gap, ms in each.items()},
            "lines": (lines or {}) if rank == slow else {"host at other.py:1 in f": 20},
        }
        for rank, each in enumerate(gaps_ms)
    ]
    return SlowRankContext(ranks=rows)


USUAL = {"start>data": 1.0, "backward>optimizer": 1.0}


def test_place_of_most_of_a_slow_ranks_host_code_is_named() -> None:
    slow = episode(phase="host", phase_excess_ns=10 * MS)
    verdict = verdict_on(
        slow, with_code(USUAL, USUAL, USUAL, {"start>data": 2.0, "backward>optimizer": 10.0})
    )

    assert "; most of the difference is between the backward pass and the optimizer" in verdict.text
    assert verdict.action.startswith("on rank 3, look at what runs between the backward pass and")


@pytest.mark.parametrize(
    ("phase", "mine"),
    [
        ("host", {"start>data": 6.0, "backward>optimizer": 6.0}),
        ("host", {"start>data": 1.0, "backward>optimizer": 3.0}),
        ("forward", {"start>data": 1.0, "backward>optimizer": 12.0}),
        ("host", {}),
    ],
    ids=["two places", "little of the excess", "another phase", "not measured"],
)
def test_no_place_is_named_without_most_of_the_difference(
    phase: str, mine: dict[str, float]
) -> None:
    slow = episode(phase=phase, phase_excess_ns=10 * MS)
    verdict = verdict_on(slow, with_code(USUAL, USUAL, USUAL, mine))

    assert "most of the difference" not in verdict.text
    assert "look at what runs" not in verdict.action


@pytest.mark.parametrize("phase", ["host", "data"])
def test_line_of_most_samples_of_the_slow_rank_is_named(phase: str) -> None:
    lines = {f"{phase} at train.py:42 in f": 8, f"{phase} at train.py:50 in g": 2}
    slow = episode(phase=phase, phase_excess_ns=10 * MS)
    verdict = verdict_on(slow, with_code(USUAL, USUAL, USUAL, USUAL, lines=lines))

    assert "8 of 10 (80%) are at train.py:42 in f." in verdict.text
    assert verdict.action == (
        "on rank 3, look at train.py:42 in f, where most of this time is spent."
    )
