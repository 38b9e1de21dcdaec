"""Predicted gains equal those of a simulation whose truth is known, or a calculation by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tests.support.findings import episode, findings, shared
from torchlens_perf.analysis.statistics.time_account import TimeAccount, find_cells, mean_by_part
from torchlens_perf.diagnosis.lost_time import classify_time
from torchlens_perf.diagnosis.step_times import (
    USES,
    StepTimes,
)
from torchlens_perf.diagnosis.what_if import (
    MODEL_ERROR,
    Replay,
    parse_change,
    predict_standard_changes,
)
from torchlens_perf.errors import ConfigError
from torchlens_perf.run.records import PASSES
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.simulation import Simulation, Topology
from torchlens_perf.verdicts.stragglers.findings import StragglerGroup
from torchlens_perf.verdicts.words.stragglers import SlowRankContext, build_slow_verdict

BLOCKS = 4


def make_times(*ranks: dict[str, float], rows: int = 64) -> StepTimes:
    """Return equal rows. ranks: ms by use; the wait of each rank is added."""
    own = [sum(rank.get(use, 0.0) for use in USES[:-1]) for rank in ranks]
    exposed = ranks[0].get("communication", 0.0)
    filled = [
        {**rank, "communication": max(own) - mine + exposed}
        for rank, mine in zip(ranks, own, strict=True)
    ]
    uses = np.array([[rank.get(use, 0.0) for use in USES] for rank in filled]) * 1e6
    count = len(ranks)
    return StepTimes(
        tuple(range(count)),
        ("",) * count,
        np.arange(rows),
        1,
        account_of(np.repeat(uses[:, None], rows, axis=1)),
    )


def account_of(uses_ns: Any) -> TimeAccount:
    """Return the account of times by use: [ranks, rows, len(USES)]."""
    lack, tool, communication = (uses_ns[..., at] for at in (-3, -2, -1))
    return TimeAccount.from_work(uses_ns[..., :-3], lack, tool, communication)


def make_facts(times: StepTimes, **changed: Any) -> Any:
    """Return the facts of a report that gains depend on."""
    step_s = float(times.uses_ns.sum(axis=2).mean()) / 1e9
    count = len(times.steps)
    long = changed.pop("long", [])
    total_s = step_s * count + sum(each["total_s"] for each in long)
    steps = {"total_s": total_s, "count": count, "warm_up": 0, "long": long}
    steps["sampled_lack_of_cpu"] = changed.pop("sampled", None)
    return {
        "run": {"judged_by": "host"},
        "steps": steps,
        "ranks": [],
        "modules": [],
        "sections": [],
        "collectives": [],
        **changed,
    }


def predict(times: StepTimes, *texts: str, **facts: Any) -> Any:
    return Replay(times, make_facts(times, **facts)).predict([parse_change(text) for text in texts])


def simulate(topology: Topology, fault: str) -> tuple[StepTimes, float]:
    """Return the steps of a simulated run, and the seconds per step that its fault costs."""
    simulation = Simulation(topology, faults=[parse_fault(fault)], seed=1)
    blocks = [simulation.block(number) for number in range(BLOCKS)]
    uses = np.zeros((topology.rank_count, sum(map(len, blocks)), len(USES)))
    uses[..., :6] = np.concatenate([block.parts_ns for block in blocks], axis=1)
    duration_ns = np.concatenate([block.duration_ns for block in blocks])
    uses[..., USES.index("communication")] = duration_ns - uses[..., :6].sum(axis=2)
    ranks = range(topology.rank_count)
    populations = tuple(topology.placement(rank).population for rank in ranks)
    times = StepTimes(
        tuple(ranks),
        populations,
        np.arange(uses.shape[1]),
        1,
        account_of(uses),
        pipelined=topology.pp > 1,
    )
    effect = simulation.fault_effects(uses.shape[1])[0]
    return times, float(effect.cost_ns.mean()) / 1e9


@pytest.mark.parametrize(
    ("topology", "error"), [(Topology(1024), 0.05), (Topology(128, 8), 0.05), (Topology(64, 4, 4), 0.07)],
    ids=["data-parallel", "tensor-parallel", "pipeline"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("constant:rank=37,share=0.25", ["rank=37@median"]),
        ("intermittent:rank=37,share=0.3", ["rank=37@median"]),
        ("node:node=3,share=0.2", [f"rank={rank}@median" for rank in range(24, 32)]),
        ("stalls:rank=37,share=2,every=5", ["data=0"]),
    ],
)
def test_gain_is_within_a_few_percent_of_the_simulated_truth(
    topology: Topology, error: float, fault: str, changes: list[str]
) -> None:
    times, truth_s = simulate(topology, fault)
    gain_s = predict(times, *changes).gain_s
    # data=0 also removes the usual time of the data phase.
    assert gain_s == pytest.approx(truth_s, rel=error)


@pytest.mark.parametrize("share", [0.05, 0.25])
def test_gain_after_the_last_gradients_is_within_a_few_percent_of_the_truth(share: float) -> None:
    """The ranks wait for each other after the backward pass, and again after the optimizer."""
    fault = f"constant:rank=37,share={share},phase=optimizer"
    times, truth_s = simulate(Topology(1024), fault)
    assert predict(times, "rank=37@median").gain_s == pytest.approx(truth_s, rel=0.05)


def test_work_that_other_ranks_wait_for_anyway_gains_nothing() -> None:
    times = make_times({"forward": 100}, {"forward": 70, "data": 25})
    assert predict(times, "data=0").gain_s == 0
    assert predict(times, "forward x0.5").gain_s == pytest.approx(0.04)


def test_gain_with_several_waits_in_a_step_is_that_of_each_segment() -> None:
    """Rank 0 is slow in the forward pass and rank 1 in the backward pass: each is waited for."""
    random = np.random.default_rng(0)
    own = {
        use: random.normal([[mean] for mean in means], 1.0, (2, 200))
        for use, means in {"forward": (60, 50), "backward": (50, 70)}.items()
    }
    parts = np.stack([own.get(use, np.zeros((2, 200))) for use in USES], axis=2) * 1e6

    def duration_ns(parts_ns: Any) -> Any:
        return sum(parts_ns[..., USES.index(use)].max(axis=0) for use in own) + 5e6

    before_ns = duration_ns(parts)
    parts[..., USES.index("communication")] = before_ns - parts.sum(axis=2)
    times = StepTimes((0, 1), ("", ""), np.arange(200), 1, account_of(parts))
    changed = np.minimum(parts, parts[::-1])
    changed[1] = parts[1]
    truth_s = float((before_ns - duration_ns(changed)).mean()) / 1e9
    assert truth_s == pytest.approx(0.01, rel=0.1)
    assert predict(times, "rank=0@median").gain_s == pytest.approx(truth_s, rel=0.02)


def test_gains_of_several_changes_are_not_summed() -> None:
    times = make_times({"forward": 100}, {"forward": 60, "host": 60})
    both = predict(times, "host=0", "rank=0@median").gain_s
    assert both == pytest.approx(0.06)
    assert predict(times, "host=0").gain_s == pytest.approx(0.02)
    assert predict(times, "rank=0@median").gain_s == 0


def test_faster_transfers_shorten_exposed_communication_only() -> None:
    times = make_times({"forward": 50, "communication": 20}, {"forward": 50})
    row = {"group": "0", "description": "dp", "operation": "allreduce", "count": 2 * 64,
           "transfer_s": {"mean_s": 0.03}}  # fmt: skip
    facts = {
        "collectives": [row],
        "ranks": [{"rank": 0, "typical": None}, {"rank": 1, "typical": None}],
    }
    assert predict(times, "bandwidth:dp x2", **facts).gain_s == pytest.approx(0.015)
    assert predict(times, "bandwidth:allreduce x100", **facts).gain_s == pytest.approx(0.02)
    assert predict(times, "overlap=all", **facts).gain_s == pytest.approx(0.02)
    with pytest.raises(ConfigError, match="no measured transfers tp"):
        predict(times, "bandwidth:tp x2", **facts)


def make_module(
    name: str, own_s: float, calls_per_step: float = 1, backward_s: float | None = None
) -> Any:
    return {
        "name": name, "is_root": False, "calls_per_step": calls_per_step, "by_rank": {"0": own_s}, "device_s": None,
        "device_own_by_rank": {}, "backward_by_rank": {} if backward_s is None else {"0": backward_s},
    }  # fmt: skip


FORWARD_AND_BACKWARD = [{"rank": 0, "typical": {"parts": {"forward": 0.04, "backward": 0.08}}}]


def test_module_gain_includes_its_share_of_the_backward_pass() -> None:
    times = make_times({"forward": 40, "backward": 80})
    modules = [make_module("blocks.0.mlp", 0.01)]
    found = predict(times, "module:blocks.*.mlp x0.5", modules=modules, ranks=FORWARD_AND_BACKWARD)
    assert found.gain_s == pytest.approx(0.005 + 0.01)


def test_passes_without_gradients_have_no_share_of_the_backward_pass() -> None:
    """The backward pass belongs to the modules of the other forward passes."""
    times = make_times({"forward": 40, "backward": 80})
    modules = [make_module(PASSES, 0.02), make_module("mlp", 0.01)]
    facts = {"modules": modules, "ranks": FORWARD_AND_BACKWARD}
    assert predict(times, f"module:{PASSES} x0.5", **facts).gain_s == pytest.approx(0.01)
    assert predict(times, "module:mlp x0.5", **facts).gain_s == pytest.approx(0.005 + 0.02)


@pytest.mark.parametrize(("passes", "backward_s"), [(1, 0.05), (2, 0.04)])
def test_module_gain_includes_modules_inside_and_sampled_backward_passes(
    passes: int, backward_s: float
) -> None:
    """With two passes in a step, the sample of one pass is not used."""
    times = make_times({"forward": 40, "backward": 80})
    modules = [
        make_module("wide", 0.015, passes, 0.05),
        make_module("wide.layer", 0.005, passes, 0.03),
        make_module("wider", 0.01, passes, 0.01),
    ]
    found = predict(times, "module:wide x0.5", modules=modules, ranks=FORWARD_AND_BACKWARD)
    assert found.gain_s == pytest.approx(0.01 + backward_s / 2)


def make_device_module(name: str, *interval: float, samples: int = 7, equal: str = "") -> Any:
    """Return a module with a device time and its interval; without them, its time is not known."""
    own_s, low_s, high_s = interval or (None, None, None)
    return {
        **make_module(name, 1.0), "device_s": {"max_s": 0.02}, "device_own_s_per_step": own_s,
        "device_own_low_s": low_s, "device_own_high_s": high_s, "device_samples": samples, "device_equal": equal,
        "device_own_by_rank": {} if own_s is None else {"0": own_s},
    }  # fmt: skip


ON_DEVICE: Any = {"run": {"judged_by": "device"}, "ranks": FORWARD_AND_BACKWARD}


def test_bounds_of_a_module_gain_include_the_interval_of_its_time() -> None:
    times = make_times({"forward": 40, "backward": 80})
    modules = [make_device_module("head", 0.010, 0.008, 0.014)]
    found = predict(times, "module:head x0.5", modules=modules, **ON_DEVICE)

    assert found.gain_s == pytest.approx(0.005 + 0.01)
    assert found.high_s - found.gain_s == pytest.approx((MODEL_ERROR + 0.3) * 0.015)
    assert found.gain_s - found.low_s == pytest.approx((MODEL_ERROR + 0.3) * 0.015)


def test_module_without_enough_samples_has_no_gain() -> None:
    """The time that the host took to issue its work is known."""
    times = make_times({"forward": 40, "backward": 80})
    modules = [make_device_module("head", samples=2), make_device_module("mlp", 0.03, 0.02, 0.04)]
    with pytest.raises(ConfigError, match=r"device time of 'head' is not known: .* 2 samples"):
        predict(times, "module:head x0.5", modules=modules, **ON_DEVICE)


@pytest.mark.parametrize(
    ("others", "changed"),
    [
        ([make_device_module("head", 0.015, 0.014, 0.016)], "module:blocks.*.mlp x0.5"),
        ([make_device_module("head", 0.03, 0.02, 0.04)], "module:head x0.5"),
        ([make_device_module("head", samples=4)], "module:blocks.*.mlp x0.5"),
        ([{**make_device_module("head", samples=4), "calls_per_step": 2}], None),
        ([make_device_module("blocks.0.mlp.up", samples=1)], None),
    ],
    ids=["together", "one is larger", "cannot be larger", "may be larger", "unknown inside"],
)
def test_largest_modules_are_changed_if_their_device_time_is_known(
    others: list[Any], changed: str | None
) -> None:
    """Three equal blocks take 24 ms together. No sample of the head took more than 20 ms a call."""
    times = make_times({"forward": 40, "backward": 80})
    blocks = [make_device_module(f"blocks.{i}.mlp", 0.008, 0.007, 0.009, equal="blocks.*.mlp")
              for i in range(3)]  # fmt: skip
    facts = make_facts(times, modules=[*blocks, *others], **ON_DEVICE)
    found, _ = predict_standard_changes(times, facts, [])
    modules = [each.change for each in found if each.change.startswith("module:")]

    assert modules == ([] if changed is None else [changed])


@pytest.mark.parametrize("text", ["host=0", "forward=0", "saving=0", "saving=0, forward=0"])
def test_gain_lies_within_its_bounds_and_is_no_longer_than_the_step(text: str) -> None:
    times = make_times({"forward": 30, "host": 10})
    facts = make_facts(times, long=[{"kinds": ["saving"], "total_s": 5.0}])
    found = Replay(times, facts).predict([parse_change(each) for each in text.split(", ")])

    assert found.low_s <= found.gain_s <= found.high_s
    assert found.share <= 1


def test_irregular_steps_gain_their_mean_per_step() -> None:
    saving = {"kinds": ["saving"], "total_s": 0.64}
    times = make_times({"forward": 10})
    assert predict(times, "saving=0", long=[saving]).gain_s == pytest.approx(0.01)
    assert predict(times, "evaluation=0", long=[saving]).gain_s == 0


@pytest.mark.parametrize("saving_s", [0.0, 0.01, 2.0])
@pytest.mark.parametrize(
    "changes",
    [["forward=0"], ["host=0"], ["forward=0", "saving=0"], ["forward=0", "host=0", "data=0"]],
)
def test_gain_is_inside_its_bounds_and_not_above_the_mean_step(
    changes: list[str], saving_s: float
) -> None:
    """The mean step is that of the replayed steps, with what irregular steps add."""
    times = make_times({"forward": 30.0, "host": 60.0, "data": 10.0})
    facts = make_facts(times, long=[{"kinds": ["saving"], "total_s": 64 * saving_s}])
    replay = Replay(times, facts)
    gain = replay.predict([parse_change(change) for change in changes])

    assert replay.step_s == pytest.approx(0.1 + saving_s)
    assert gain.low_s <= gain.gain_s <= gain.high_s <= replay.step_s
    assert gain.share <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("faster", "is not a change. Changes: rank=3@median"),
        ("dataa=0", "with a PART of data, forward"),
        ("module x0.5", "module"),
        ("bandwidth:dp=0", "cannot become 0"),
        ("rank=7@median", "has no rank 7"),
        ("module:nothing x0.5", "no timed module"),
        ("section:nothing=0", "no section"),
        ("bubble=0", "no pipeline"),
    ],
)
def test_change_that_names_nothing_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict(make_times({"forward": 10}, {"forward": 10}), text)


def test_no_gains_are_predicted_if_ranks_do_not_wait_for_each_other() -> None:
    times = make_times({"forward": 100}, {"forward": 50})
    times.account.cells_ns[..., find_cells(("communication",), ())] = 0
    changes, drift = predict_standard_changes(times, make_facts(times), [])
    assert (changes, drift > 0.3) == ([], True)


def slow_verdict(ranks: tuple[int, ...], cost_s: float, *others: int, gain_s: float = 0.0) -> Any:
    """Return the verdict on slow ranks. others: ranks that share its cost. gain_s: the gain of
    repairing only these ranks."""
    lead = episode(ranks[0], shared=shared(1e9 * cost_s, 1e9 * gain_s))
    group = StragglerGroup("rank", "", ranks, lead, slow_too=others)
    verdict = build_slow_verdict(SlowRankContext(), group, findings())
    return structs.replace(
        verdict, cost_s_per_step=cost_s, cost_share=0.6, phase="forward", since_step=0
    )


def test_gain_of_the_named_slow_rank_is_the_cost_of_its_verdict_everywhere() -> None:
    times = make_times({"forward": 10}, {"forward": 30})
    facts, verdicts = make_facts(times), [slow_verdict((1,), 0.019)]
    changes, _ = predict_standard_changes(times, facts, verdicts)
    gains = {each.change: each for each in changes}
    asked = Replay(times, facts, verdicts).predict([parse_change("rank=1@median")])
    slow = next(each for each in classify_time(times, facts, verdicts) if each.ranks)
    assert gains["rank=1@median"] == asked
    assert (asked.gain_s, asked.share) == (0.019, 0.6)
    assert (slow.ranks, slow.s_per_step) == ([1], pytest.approx(0.019))
    assert slow.share == pytest.approx(asked.share)
    # Repairing all ranks gains no less than repairing one of them.
    assert gains["rank=all@median"].gain_s >= asked.gain_s


def test_cost_that_two_slow_parts_share_is_one_class_and_each_has_its_own_gain() -> None:
    """Without rank 1, the job waits for rank 2. Without both, it gains 40 ms."""
    times = make_times({"forward": 60}, {"forward": 100}, {"forward": 75}, {"forward": 60})
    facts = make_facts(times)
    verdicts = [slow_verdict((1,), 0.040, 2, gain_s=0.024), slow_verdict((2,), 0.040, 1)]
    slow = [each for each in classify_time(times, facts, verdicts) if each.ranks]
    assert [(each.ranks, each.s_per_step) for each in slow] == [([1, 2], pytest.approx(0.04))]
    changes, _ = predict_standard_changes(times, facts, verdicts)
    gains = {each.change: each.gain_s for each in changes}
    assert gains["rank=1-2@median"] == pytest.approx(0.040)
    assert gains["rank=1@median"] == pytest.approx(0.024), "the verdict's gain"
    assert "rank=2@median" not in gains  # It gains nothing alone.
    assert gains["rank=all@median"] == pytest.approx(0.040)


def test_steps_before_a_rank_became_slow_are_left_out() -> None:
    times = make_times({"forward": 10}, {"forward": 30})
    assert times.select_since(40).steps.tolist() == list(range(40, 64))
    assert times.select_since(60) is times  # Too few steps would remain.


def test_classes_add_up_to_the_mean_step_the_largest_first() -> None:
    times = make_times({"forward": 10, "data": 5, "communication": 2}, {"forward": 14, "data": 5})
    saving = {"kinds": ["saving"], "total_s": 6.4}
    facts = make_facts(times, long=[saving])
    classes = classify_time(times, facts, [])
    assert sum(each.s_per_step for each in classes) == pytest.approx(0.021 + 0.1)
    seconds = {each.name: each.s_per_step for each in classes}
    assert seconds == {
        "saving": pytest.approx(0.1), "forward": pytest.approx(0.01), "data": pytest.approx(0.005),
        "imbalance": pytest.approx(0.004), "communication": pytest.approx(0.002),
    }  # fmt: skip
    assert [each.name for each in classes[:2]] == ["saving", "forward"]


def test_sections_are_classes_of_host_code_and_the_inner_one_is_named() -> None:
    times = make_times({"forward": 10, "host": 30})
    sections = [
        {"name": "outer", "host_s_per_typical_step": 0.02},
        {"name": "inner", "host_s_per_typical_step": 0.018},
        {"name": "log", "host_s_per_typical_step": 0.004},
    ]
    classes = classify_time(times, make_facts(times, sections=sections), [])
    seconds = {each.name: each.s_per_step for each in classes}
    assert seconds == {
        "section inner": pytest.approx(0.018), "section log": pytest.approx(0.004),
        "host": pytest.approx(0.008), "forward": pytest.approx(0.01),
    }  # fmt: skip


def contended(parts_ms: dict[str, float], lack_ms: dict[str, float], rows: int = 64) -> StepTimes:
    """Return equal steps of one rank with CPU contention inside of their parts."""
    parts, lack = (1e6 * mean_by_part([each]) for each in (parts_ms, lack_ms))
    account = TimeAccount.from_parts(np.tile(parts, (1, rows, 1)), np.tile(lack, (1, rows, 1)))
    return StepTimes((0,), ("",), np.arange(rows), 1, account)


def test_work_that_waits_for_a_cpu_is_removed_with_its_waits() -> None:
    """A loader in the training process works 20 of 72 ms. It gains 72 ms, and no part loses others'."""
    times = contended({"data": 72, "forward": 20}, {"data": 52, "forward": 3})
    assert predict(times, "data=0").gain_s == pytest.approx(0.072)
    assert predict(times, "contention=0").gain_s == pytest.approx(0.055)
    classes = classify_time(times, make_facts(times), [])
    assert {each.name: each.s_per_step for each in classes} == {
        "cpu": pytest.approx(0.055), "data": pytest.approx(0.020), "forward": pytest.approx(0.017),
    }  # fmt: skip


def test_second_half_of_a_module_gains_as_much_as_the_first() -> None:
    """The module's time and that of the forward pass are both wall time with waits for a CPU."""
    times = contended({"forward": 100, "host": 20}, {"forward": 15, "host": 2})
    modules = [make_module("extra", 0.06)]
    half = predict(times, "module:extra x0.5", modules=modules).gain_s
    assert half == pytest.approx(0.03)
    assert predict(times, "module:extra=0", modules=modules).gain_s == pytest.approx(2 * half)


def test_a_part_that_sleeps_keeps_its_time_beside_contention_of_other_parts() -> None:
    times = contended({"data": 20, "forward": 80}, {"forward": 60})
    classes = {each.name: each for each in classify_time(times, make_facts(times), [])}
    assert classes["data"].s_per_step == pytest.approx(0.020)
    assert classes["forward"].s_per_step == pytest.approx(0.020)


@pytest.mark.parametrize(
    ("text", "carried"),
    [
        ("forward=0", False), ("optimizer x0.5", False), ("module:extra=0", False),
        # The waits are in what is removed, or the work stays as it is.
        ("data=0", True), ("contention=0", True), ("saving=0", True), ("overlap=all", True),
    ],
)  # fmt: skip
def test_no_gain_is_predicted_beside_contention_that_it_changes(text: str, carried: bool) -> None:
    times = contended({"data": 70, "forward": 20, "optimizer": 10}, {"data": 50, "forward": 5})
    facts = make_facts(times, modules=[make_module("extra", 0.01)])
    assert (Replay(times, facts).predict([parse_change(text)]) is not None) is carried
    changes, _ = predict_standard_changes(times, facts, [])
    assert {each.change for each in changes} == {"data=0", "contention=0"}


def test_sampled_contention_counts_where_it_was_not_measured() -> None:
    times = contended({"forward": 20}, {"data": float("nan")})
    for sampled, carried in ((0.5, False), (0.1, True), (None, True)):
        facts = make_facts(times, sampled=sampled)
        found = Replay(times, facts).predict([parse_change("forward=0")])
        assert (found is not None) is carried


def test_verdict_on_a_slow_rank_is_answered_beside_contention() -> None:
    times = contended({"forward": 100}, {"forward": 50})
    facts, verdicts = make_facts(times), [slow_verdict((0,), 0.019)]
    found = Replay(times, facts, verdicts).predict([parse_change("rank=0@median")])
    assert found is not None
    assert found.gain_s == 0.019


def test_waits_that_were_not_measured_stay_in_their_part() -> None:
    times = contended({"data": 20, "forward": 80}, {"data": float("nan")})
    assert not times.account.is_measured.any()
    classes = {each.name: each.s_per_step for each in classify_time(times, make_facts(times), [])}
    assert classes == {"forward": pytest.approx(0.08), "data": pytest.approx(0.02)}


@pytest.mark.long
def test_thousands_of_ranks_take_less_than_a_second_of_cpu_time() -> None:
    import time

    times, _ = simulate(Topology(4096), "constant:rank=37,share=0.1")
    rows = times.account.select(np.s_[:, :64])
    window = StepTimes(times.ranks, times.populations, times.steps[:64], 1, rows)
    facts = make_facts(window)
    predict_standard_changes(window, facts, [])
    begin_s = time.process_time()
    changes, _ = predict_standard_changes(window, facts, [])
    classes = classify_time(window, facts, [])
    # The bar is one second of a core. A slow or busy machine takes several times as long.
    assert time.process_time() - begin_s < 5
    assert changes
    assert classes
