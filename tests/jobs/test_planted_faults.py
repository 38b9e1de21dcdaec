"""Tests of the fault campaign: planted faults match the truth, and answers are scored correctly."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks import planted_faults
from benchmarks.planted_training import (
    BATCH,
    LENGTH,
    VOCABULARY,
    Planted,
    Sequences,
    Transformer,
    busy_s,
    others_share,
    train,
)
from benchmarks.planted_truth import FAULTY, FIRST_STEPS, HEALTHY, KINDS, Fault, Truth, plant
from benchmarks.planted_verdicts import (
    JUDGES,
    Suspect,
    healthy_named,
    print_judgement,
    recorded,
    score,
    slowest_step,
)
from tests.support.findings import episode, findings
from tests.support.ranks import HOST, Rank, make_run
from tests.support.recording import recorded as recording_of
from torchlens_perf.run.directory import sidecar_lock_path
from torchlens_perf.run.ring import Kind
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.sidecar.loop import run_sidecar
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups

SEEDS = range(200)


def steps_of(fault: Fault, steps: int) -> list[int]:
    return [step for step in range(steps) if fault.slows(step)]


def test_kind_and_seed_determine_the_planted_fault() -> None:
    """Different seeds plant different faults."""
    for kind in KINDS:
        assert plant(kind, 7) == plant(kind, 7)
        assert len({plant(kind, seed).faults for seed in range(30)}) > (15 if kind in FAULTY else 0)
    assert all(plant(kind, seed).faults == () for kind in HEALTHY for seed in range(5))


def test_ground_truth_of_every_kind_is_read_as_written(tmp_path: Path) -> None:
    """A file with additional fields can be read too."""
    for kind in KINDS:
        for seed in range(10):
            truth = plant(kind, seed)
            (tmp_path / "truth.json").write_text(json.dumps({**truth.to_json(), "run": "x"}))
            assert Truth.read(tmp_path / "truth.json") == truth


def test_ranks_and_first_steps_of_faults_are_uniformly_distributed() -> None:
    """A judge that always names the same rank is therefore right only by chance."""
    truths = [plant(kind, seed) for kind in FAULTY for seed in SEEDS]
    ranks = Counter(truth.faults[0].rank for truth in truths)
    firsts = [truth.faults[0].first_step for truth in truths]

    assert set(ranks) == {0, 1, 2, 3}
    assert max(ranks.values()) < 1.25 * len(truths) / 4
    assert (min(firsts), max(firsts)) == FIRST_STEPS


def test_moving_fault_changes_its_rank_once() -> None:
    """The change has no pause and is long before the run's end."""
    for seed in SEEDS:
        truth = plant("moving", seed)
        before, after = truth.faults
        assert before.rank != after.rank
        assert before.last_step == after.first_step - 1
        assert 40 <= after.first_step - before.first_step <= 60
        assert truth.steps - after.first_step >= 60
        assert (before.phase, before.ms, before.way) == (after.phase, after.ms, after.way)


def test_intermittent_fault_slows_two_steps_in_seven() -> None:
    """From the first slow step on, any seven consecutive steps contain two slow ones at varying
    positions.
    """
    slots = set()
    for seed in SEEDS:
        truth = plant("intermittent", seed)
        (fault,) = truth.faults
        slow = steps_of(fault, truth.steps)
        assert all(
            sum(begin <= step < begin + 7 for step in slow) == 2
            for begin in range(fault.first_step, truth.steps - 7)
        )
        assert fault.slow_of is not None
        slots.add(fault.slow_of[1])
    assert len(slots) > 10


def test_planted_pause_is_recorded_in_its_phase_and_step(tmp_path: Path) -> None:
    ms, rank = 400, 1
    pauses = {
        "data": (3, "sleep"),
        "forward": (5, "work"),
        "backward": (7, "sleep"),
        "host": (9, "write"),
    }
    faults = tuple(Fault(rank, phase, step, step, ms, way) for phase, (step, way) in pauses.items())
    planted = Planted(Truth("clean", 1, 4, 12, faults), rank)
    model = Transformer(planted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(
        Sequences(Truth("clean", 1, 4, 12, faults), rank, planted), batch_size=BATCH
    )
    with recording_of(tmp_path, model, optimizer, modules="none") as recording:
        assert len(train(model, optimizer, loader, planted)) == 12

    kinds = {"data": Kind.DATA, "forward": Kind.FORWARD, "backward": Kind.BACKWARD}
    durations_ns = {
        phase: {each.step: each.duration_ns for each in recording.of(kind)}
        for phase, kind in kinds.items()
    }
    durations_ns["host"] = {each.step: each.duration_ns - each.phase_ns for each in recording.steps}
    for phase, (step, _) in pauses.items():
        planted_ns = durations_ns[phase].pop(step)
        assert planted_ns >= ms * 1e6
        assert planted_ns - statistics.median(durations_ns[phase].values()) > ms * 1e6 / 2


def test_fault_is_planted_only_on_its_own_rank() -> None:
    (fault,) = plant("data", 3).faults
    steps = range(180)

    def slow_steps(rank: int) -> list[int]:
        planted, found = Planted(plant("data", 3), rank), []
        for planted.step in steps:
            if planted.now("data"):
                found.append(planted.step)
        return found

    assert slow_steps(fault.rank) == list(range(fault.first_step, 180))
    assert [slow_steps(rank) for rank in range(4) if rank != fault.rank] == [[], [], []]


def test_planted_compute_changes_no_result() -> None:
    """Additional compute gives the same loss and gradients, so the rank is slow and not wrong."""
    truth = plant("compute", 1)
    planted = Planted(truth, truth.faults[0].rank)
    torch.manual_seed(0)
    model = Transformer(planted)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    calls: Counter[str] = Counter()
    for name, module in model.blocks.named_children():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))

    def gradients(step: int) -> list[torch.Tensor]:
        planted.step = step
        model.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    healthy = gradients(truth.faults[0].first_step - 1)
    healthy_calls = calls.total()
    slowed = gradients(truth.faults[0].first_step)
    assert (healthy_calls, calls.total() - healthy_calls) == (4, 5)
    for one, other in zip(healthy, slowed, strict=True):
        torch.testing.assert_close(one, other)


def test_input_lengths_vary_only_in_variable_length_runs() -> None:
    """Lengths differ between ranks and steps, with the same mean."""

    def lengths(kind: str, rank: int) -> list[int]:
        truth = plant(kind, 2)
        data = Sequences(truth, rank, Planted(truth, rank))
        return [len(data[BATCH * step][0]) for step in range(truth.steps)]

    assert set(lengths("clean", 0)) == {LENGTH}
    varied = [lengths("variable_length", rank) for rank in range(4)]
    assert len({tuple(each) for each in varied}) == 4
    assert all(abs(sum(each) / len(each) - LENGTH) < LENGTH / 8 for each in varied)
    assert all(min(each) < LENGTH / 2 < 1.5 * LENGTH < max(each) for each in varied)


@pytest.mark.parametrize(
    ("kind", "right", "phase"),
    [
        ("compute", "forward", True),
        ("compute", "compute", True),
        ("compute", "data", False),
        ("data", "data", True),
    ],
)
def test_answer_of_a_judge_is_right_only_with_the_right_rank(
    kind: str, right: str, phase: bool
) -> None:
    """The phase counts only together with the right rank.

    In a run without a fault, any named rank is a false alarm.
    """
    truth = plant(kind, 4)
    rank = truth.faults[0].rank
    yes = score(truth, Suspect(rank, right))
    no = score(truth, Suspect((rank + 1) % 4, right))

    assert (yes.right_rank, yes.right_phase, yes.named) == (True, phase, True)
    assert (no.right_rank, no.right_phase, no.named) == (False, False, True)
    assert not score(truth, None).named
    assert score(plant("clean", 4), Suspect(0, "data")).named
    assert not score(plant("clean", 4), None).named


def test_healthy_ranks_named_second_or_earlier_are_counted() -> None:
    truth = plant("data", 4)
    planted = truth.faults[0].rank
    second, earlier, small = (rank for rank in range(4) if rank != planted)
    found = findings(
        episode(planted),
        episode(second),
        episode(earlier, 20, until=70),
        episode(small, 20, until=70, excess_ns=1.0, cost_ns=1.0),
    )

    assert healthy_named(add_straggler_groups(found, {}), truth) == {second, earlier}
    assert healthy_named(findings(episode(planted)), truth) == set()


def test_last_slow_rank_is_the_right_answer_if_the_fault_moved() -> None:
    truth = plant("moving", 5)
    before, after = truth.faults

    assert score(truth, Suspect(after.rank, after.phase)).right_rank
    assert not score(truth, Suspect(before.rank, before.phase)).right_rank


def test_slowest_step_judge_names_the_rank_with_the_largest_mean_step(tmp_path: Path) -> None:
    """Steps before the end of warm-up are ignored.

    Runs without a file of the truth are not judged.
    """
    rows = [
        {
            "rank": rank,
            "step": step,
            "duration_ns": (
                10_000 + (500 if rank == 2 else 0) + (10**9 if step < 3 and rank == 0 else 0)
            ),
        }
        for rank in range(4)
        for step in range(20)
    ]
    for name in ("clean-0001", "data-0003", "broken"):
        steps = tmp_path / name / "run" / "steps"
        steps.mkdir(parents=True)
        pd.DataFrame(rows).to_parquet(steps / "host-000001.parquet")
        if name != "broken":
            kind, _, seed = name.partition("-")
            truth = {
                **plant(kind, int(seed)).to_json(),
                "run": "run",
                "others_share": int(seed) / 10,
            }
            (tmp_path / name / "truth.json").write_text(json.dumps(truth))

    assert slowest_step(tmp_path / "clean-0001") == Suspect(2, None)
    assert [truth.name for _, truth in recorded(tmp_path, KINDS, None)] == [
        "data-0003",
        "clean-0001",
    ]
    assert [truth.name for _, truth in recorded(tmp_path, ["clean"], [1])] == ["clean-0001"]
    assert recorded(tmp_path, ["clean"], [2]) == []
    assert [truth.name for _, truth in recorded(tmp_path, KINDS, None, most_others=0.2)] == [
        "clean-0001"
    ]
    assert JUDGES["slowest step"] is slowest_step


def test_recorded_run_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only our verdict and the rule of step times judge this run."""
    truth = Truth("data", 1, 2, 60, (Fault(1, "data", 0, None, 5, "sleep"),))
    run = make_run(tmp_path / truth.name)
    for rank, data_ms in enumerate((1, 6)):
        one = Rank(run, rank)
        one.steps(60, data=data_ms, forward=10, backward=20, communication=7 - data_ms)
        one.close()
    lock = SidecarLock(sidecar_lock_path(run.run_id))
    assert lock.acquire()
    run_sidecar(Sidecar(run, HOST, None, lambda *_: None), lock)
    (run.path.parent / "truth.json").write_text(
        json.dumps({**truth.to_json(), "run": run.run_id, "others_share": 0.0})
    )

    assert print_judgement(tmp_path, ["data"], None, each=True) == 0
    line, *_, row = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "data-0001: planted rank 1 data 5; torchlens_perf: rank 1 data; slowest step: rank "
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["data", "1", "0", "1/1", "1/1", "1/1"]
    assert cells[-2:] == ["0/1", "1/1"]
    assert print_judgement(tmp_path, ["clean"], None) == 1


def test_processor_share_of_other_programs_excludes_our_work() -> None:
    """Processor time of ranks and sidecar is our work."""
    begin_s, machine_s, own_s = time.monotonic(), busy_s(), time.process_time()
    while time.process_time() - own_s < 0.5:
        pass
    machine_s, own_s, elapsed_s = (
        busy_s() - machine_s,
        time.process_time() - own_s,
        time.monotonic() - begin_s,
    )

    assert machine_s > 0.8 * own_s
    claimed, unclaimed = (others_share(ours, machine_s, elapsed_s) for ours in (own_s, 0.0))
    assert unclaimed - claimed > 0.4 / (elapsed_s * os.cpu_count())
    assert others_share(2.0, 1.9, 1.0) == 0.0


def test_seeds_are_parsed_from_numbers_and_ranges() -> None:
    assert planted_faults.seeds("3,5-7") == [3, 5, 6, 7]
    with pytest.raises(ValueError, match="invalid literal"):
        planted_faults.seeds("")


def test_unknown_fault_kind_or_way_raises_an_error() -> None:
    """Without the error, a misspelt kind or way would plant nothing."""
    with pytest.raises(ValueError, match="unknown kind 'dta'"):
        plant("dta", 1)
    truth = plant("data", 1)
    (fault,) = truth.faults
    planted = Planted(
        dataclasses.replace(truth, faults=(dataclasses.replace(fault, way="nap"),)), fault.rank
    )
    planted.step = fault.first_step
    with pytest.raises(ValueError, match="unknown way 'nap'"):
        planted.pause("data")
