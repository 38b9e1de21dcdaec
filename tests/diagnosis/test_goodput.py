"""The classes of a job's time have the planted shares, and add up to the wall clock."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.exporters.test_exporters import identity
from tests.support.facts import take_facts
from tests.support.reports import checked
from tests.support.simulated_runs import simulate_run
from tests.support.tables import mixed_table
from torchlens_perf.analysis.statistics.hardware import GpuTotals, HardwareTotals
from torchlens_perf.analysis.statistics.quantities import format_rounded
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.commands.cli import main
from torchlens_perf.diagnosis.goodput import (
    CLASSES,
    StragglerLoss,
    build_goodput,
    combine_attempts,
)
from torchlens_perf.report.build import build_report
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.finding_log import FindingRecords
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, HOST
from torchlens_perf.verdicts.words.report_goodput import Goodput, JobAttempt
from torchlens_perf.view.tables import build_tables

MS, S = 1_000_000, 1_000_000_000
TRAIN = {"data": 10.0, "forward": 60.0, "communication": 30.0}
BOOT = Anchor(0, 1_700_000_000 * S, 0)
BEGIN_S = 1000
"""Start of the first step by the monotonic clock."""


def clock_ns(seconds: float) -> int:
    """Return the monotonic time this long after BEGIN_S."""
    return round((BEGIN_S + seconds) * S)


def process(
    steps: list[dict[str, Any]], *, after_s: float = 0.0, rank: int = 0, **changed: Any
) -> ProcessState:
    """Return an ended process.

    after_s: start of the first step. changed: fields of the process, of its facts, or of its identity.
    """
    table = mixed_table(steps)
    table = dataclasses.replace(table, start_ns=table.start_ns + clock_ns(after_s))
    statistics = RankStatistics()
    statistics._add_steps(table, table.parts_ns[:, :2] * 0)
    facts = take_facts(changed)
    fields = {field.name for field in dataclasses.fields(ProcessState)}
    of_state = {name: value for name, value in changed.items() if name in fields}
    others = {name: value for name, value in changed.items() if name not in fields}
    values = {"ended": "closed", "judged_by": HOST, **of_state}
    who = identity(rank, **{"pid": 100 + rank, **others})
    return ProcessState(who, BOOT, statistics, facts=facts, **values)


def state_of(*processes: ProcessState, **changed: Any) -> NodeState:
    return NodeState(
        "node-a", {str(place): each for place, each in enumerate(processes)}, **changed
    )


def seconds(goodput: Goodput | None) -> dict[str, float]:
    """Return the classes that have time. They must add up to the wall clock."""
    assert goodput is not None
    classes = {name: each.seconds or 0.0 for name, each in goodput.classes.items()}
    assert list(classes) == list(CLASSES)
    assert sum(classes.values()) == pytest.approx(goodput.wall_s)
    assert sum(each.share or 0.0 for each in goodput.classes.values()) == pytest.approx(1.0)
    return {name: value for name, value in classes.items() if value > 1e-6}


def test_steps_are_divided_by_their_parts_and_by_what_only_some_of_them_do() -> None:
    """Warm-up, compilation, an evaluation and a checkpoint count with their excess."""
    slow = {**TRAIN, "forward": 560.0}
    steps: list[dict[str, Any]] = [dict(TRAIN) for _ in range(103)]
    steps[0] = slow
    steps[20] = {**slow, "flags": Flag.COMPILED}
    steps[40] = {**TRAIN, "host": 2000.0, "flags": Flag.CHECKPOINT}
    steps[60] = {**TRAIN, "forward": 1060.0, "flags": Flag.EVALUATION | Flag.EVALUATED}
    found = seconds(
        build_goodput(
            [state_of(process(steps, process_began_ns=clock_ns(-20), seen_ns=clock_ns(17)))], []
        )
    )

    # The watch ends 17 s after the start of 103 steps of 0.1 s that take 4 s more in total.
    assert found == pytest.approx(
        {
            "productive": 6.18, "startup": 20.0 + 0.5 + 0.5, "data_stall": 1.03, "communication": 3.09,
            "checkpoint": 2.0, "evaluation": 1.0, "idle": 17.0 - 14.3,
        },
        rel=0.01,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (Flag.EVALUATION, "without_gradients"),
        (Flag.EVALUATION | Flag.CHECKPOINT, "without_gradients"),
        (Flag.EVALUATION | Flag.EVALUATED, "evaluation"),
    ],
)
def test_passes_without_gradients_are_an_evaluation_only_if_the_job_says_so(
    flags: Flag, name: str
) -> None:
    """Rollouts of reinforcement learning are passes without gradients, too."""
    steps: list[dict[str, Any]] = [dict(TRAIN) for _ in range(40)]
    steps[20] = {**TRAIN, "forward": 1060.0, "flags": flags}
    found = seconds(build_goodput([state_of(process(steps))], []))

    assert found[name] == pytest.approx(1.0, rel=0.01)
    assert not {"evaluation", "without_gradients"} & found.keys() - {name}


def test_mean_over_ranks_is_shown_and_a_later_rank_starts_up_longer() -> None:
    ranks = [
        process([TRAIN] * 20, rank=rank, process_began_ns=clock_ns(-10), after_s=rank)
        for rank in range(2)
    ]
    found = seconds(build_goodput([state_of(*ranks)], []))

    assert found["startup"] == pytest.approx(10.5)
    assert found["idle"] == pytest.approx(0.5)  # Rank 0 has ended a second earlier.
    assert found["data_stall"] == pytest.approx(0.2)


def test_straggler_loss_is_taken_from_the_waits_of_the_others_and_its_own_phase() -> None:
    ranks = [process([TRAIN] * 103, rank=rank, world_size=4) for rank in range(4)]
    found = seconds(build_goodput([state_of(*ranks)], [StragglerLoss(2.0, 1, False)]))

    assert found["straggler"] == pytest.approx(2.0)
    assert found["communication"] == pytest.approx(3.09 - 1.5)
    assert found["productive"] == pytest.approx(6.18 - 0.5)


def test_hang_that_ends_and_hang_in_which_the_job_is_killed_are_hangs() -> None:
    """The rest of the time until a failed attempt's end is part of the restart."""
    steps: list[dict[str, Any]] = [dict(TRAIN) for _ in range(40)]
    steps[20] = {**TRAIN, "communication": 30_000.0}
    first = [process(steps, rank=rank, ended="died", seen_ns=clock_ns(100)) for rank in range(2)]
    again = [
        process([TRAIN] * 20, rank=rank, pid=200 + rank, attempt=1, after_s=110, process_began_ns=clock_ns(102))
        for rank in range(2)
    ]  # fmt: skip
    records = FindingRecords(1, hung_s={0: {20: 25.0, 40: 55.0}})
    found = seconds(build_goodput([state_of(*first, *again, records=records)], []))

    assert found["hang"] == pytest.approx(80.0)
    # The job was killed 66 s after its last step, 2 s before the same launcher began again.
    assert found["restart"] == pytest.approx(100 - 33.97 - 55 + 2)
    assert found["startup"] == pytest.approx(8.0)


@pytest.mark.parametrize(("launcher", "name"), [(1, "restart"), (2, "idle")])
def test_time_between_attempts_is_a_restart_only_if_the_launcher_lived(
    launcher: int, name: str
) -> None:
    """A requeued job is started by another launcher, and uses no devices until then."""
    first = process([TRAIN] * 20, ended="died")
    again = process(
        [TRAIN] * 20, after_s=32, process_began_ns=clock_ns(22), attempt=1, pid=200, launcher_pid=launcher
    )  # fmt: skip
    goodput = build_goodput([state_of(first, again)], [])
    assert goodput is not None
    assert seconds(goodput)[name] == pytest.approx(20.0)
    hours = goodput.classes[name].device_hours
    # The state of the second rank is missing.
    assert hours == pytest.approx(2 * 20 / 3600 if name == "restart" else 0.0)
    table = next(
        each for each in build_tables(build_report("run", [state_of(first, again)]))
        if each.key == "goodput"
    )  # fmt: skip
    assert table.note.startswith("2 attempts, which made an unknown number of steps again.")


def test_process_that_a_rank_started_is_no_attempt() -> None:
    """Such a process has a watch of its own, and inherits the rank's variables."""
    ranks = [process([TRAIN] * 40, rank=rank) for rank in range(2)]
    child = process([TRAIN] * 5, world_size=1, launcher_pid=100, pid=300, after_s=1)
    goodput = build_goodput([state_of(*ranks, child)], [])
    assert goodput is not None
    assert [each.devices for each in goodput.attempts] == [2]


def test_startup_of_a_notebook_is_idle() -> None:
    notebook = process([TRAIN] * 20, process_began_ns=clock_ns(-60), interactive=True)
    assert seconds(build_goodput([state_of(notebook)], []))["idle"] == pytest.approx(60.0)


def test_waits_of_a_judged_device_are_by_its_clock() -> None:
    """The host's step times are divided as the device's steps are."""
    rank = process([{"forward": 90.0, "host": 10.0}] * 43, compute_device="cuda", judged_by=DEVICE)
    rank.statistics.device_mix.add_steps(mixed_table([{"forward": 60, "communication": 40}] * 40))
    found = seconds(build_goodput([state_of(rank)], []))
    assert found == pytest.approx({"productive": 2.58, "communication": 1.72})


def test_missing_records_are_other_time() -> None:
    ranks = process([TRAIN] * 40)
    assert ranks.statistics.ended_ns is not None
    ranks.statistics.ended_ns += 6 * S
    assert seconds(build_goodput([state_of(ranks)], []))["other"] == pytest.approx(6.0)


def test_waits_of_an_untimed_device_are_not_measured_instead_of_zero() -> None:
    goodput = build_goodput([state_of(process([TRAIN] * 40, compute_device="cuda"))], [])
    assert goodput is not None
    assert goodput.classes["communication"].seconds is None
    assert goodput.classes["data_stall"].device_hours is None
    assert seconds(goodput)["productive"] == pytest.approx(4.0)


def test_live_job_counts_until_its_last_step_and_needs_a_known_time() -> None:
    live = process([TRAIN] * 40, ended="", seen_ns=clock_ns(90))
    goodput = build_goodput([state_of(live)], [])
    assert goodput is not None
    assert goodput.wall_s == pytest.approx(4.0)
    waiting = ProcessState(identity(), BOOT, RankStatistics())
    assert build_goodput([state_of(waiting)], []) is None
    waiting.facts.process_began_ns, waiting.seen_ns = 5 * S, 25 * S
    assert seconds(build_goodput([state_of(waiting)], [])) == {"startup": pytest.approx(20.0)}


def test_energy_is_divided_by_steps_and_tokens_or_not_measured() -> None:
    worker = process([TRAIN] * 40)
    totals = HardwareTotals(gpus={"GPU-1": GpuTotals(grown={"energy_j": 800.0})})
    state = state_of(worker, telemetry=totals)
    found = build_report("run", [state])["goodput"]
    assert found is not None
    assert (found.energy_j_per_step, found.energy_j_per_token) == (20.0, None)
    operators = worker.statistics.operators
    operators.workload, operators.workload_steps = 1600, 40
    found = build_report("run", [state])["goodput"]
    assert found is not None
    assert found.energy_j_per_token == 0.5
    table = next(
        each for each in build_tables(build_report("run", [state])) if each.key == "goodput"
    )
    assert table.note == "Energy: 20 J per step, 0.500 J per token."
    operators.workload_steps = 39
    found = build_report("run", [state])["goodput"]
    assert found is not None
    assert found.energy_j_per_token is None
    totals.gpus["GPU-1"].grown.clear()
    found = build_report("run", [state])["goodput"]
    assert found is not None
    assert found.energy_j is None


# -- attempts


def attempt(
    began_s: float,
    steps: int,
    first: int | None = None,
    saved: int | None = None,
    productive_s: float | None = None,
) -> JobAttempt:
    """Return an attempt of two ranks with a productive second per step and 10 s of start-up."""
    time_s = dict.fromkeys(CLASSES, 0.0)
    time_s["startup"], time_s["productive"] = 10.0, steps if productive_s is None else productive_s
    return JobAttempt(
        attempt=0, devices=2, began_unix_s=began_s, ended_unix_s=began_s + sum(time_s.values()), steps=steps,
        first_step=first, saved_step=saved, lost_steps=0, seconds=time_s, not_measured=[],
    )  # fmt: skip


def test_steps_that_a_later_attempt_made_again_are_lost_work() -> None:
    goodput = combine_attempts([attempt(0, 75, 0), attempt(85, 40, 60)])
    assert (goodput.lost_steps, goodput.lost_steps_from) == (15, "step counter")
    assert seconds(goodput) == {"productive": 100.0, "startup": 20.0, "lost_work": 15.0}


def test_steps_are_lost_by_the_attempt_that_returns_furthest() -> None:
    """The third attempt starts from an older checkpoint than the second one."""
    goodput = combine_attempts([attempt(0, 75, 0), attempt(85, 40, 60), attempt(135, 60, 50)])
    assert [each.lost_steps for each in goodput.attempts] == [25, 40, 0]


def test_attempt_that_fails_before_its_first_step_loses_no_steps() -> None:
    goodput = combine_attempts([attempt(0, 75, 0), attempt(85, 0), attempt(95, 40, 60)])
    assert goodput.lost_steps == 15


def test_lost_steps_are_estimated_from_checkpoints_without_a_step_counter() -> None:
    goodput = combine_attempts(
        [attempt(0, 75, saved=61), attempt(85, 40, saved=21), attempt(135, 9)]
    )
    assert (goodput.lost_steps, goodput.lost_steps_from) == (14 + 19, "checkpoints")


def test_lost_steps_are_not_measured_without_counter_and_checkpoint() -> None:
    goodput = combine_attempts([attempt(0, 75), attempt(85, 40)])
    assert (goodput.lost_steps, goodput.lost_steps_from) == (None, "")
    assert goodput.classes["lost_work"].seconds is None
    assert seconds(goodput)["productive"] == 115.0


def test_waiting_for_a_requeue_is_idle_and_uses_no_device() -> None:
    """A failed attempt saw its checkpoint at step 60, and the next one continues after a queue."""
    goodput = combine_attempts([attempt(0, 75, 0), attempt(1085, 40, 60)])
    assert goodput.wall_s == 1135.0
    assert seconds(goodput)["idle"] == 1000.0
    assert goodput.classes["idle"].device_hours == 0.0
    assert goodput.classes["lost_work"].device_hours == pytest.approx(2 * 15 / 3600)
    assert goodput.lost_steps == 15


# -- simulated runs and commands


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose rank 2 computes 25 % longer from step 40 on."""
    fault = "constant:rank=2,share=0.25,phase=forward,since=40"
    path = tmp_path_factory.mktemp("goodput") / "run"
    return simulate_run(path, "--fault", fault, ranks=4, steps=200)


def test_simulated_straggler_has_its_planted_share(simulated: Path) -> None:
    """The fault adds 50 ms to 200 ms of work in 160 of 200 steps."""
    run = RunDirectory(simulated)
    report = checked(build_report(run.run_id, node_state.load_all(run)))
    found = seconds(report["goodput"])

    # The wall clock is the run's own, not that of the simulator.
    assert report["goodput"].wall_s == pytest.approx(report["steps"]["total_s"], rel=0.1)
    assert found["straggler"] == pytest.approx(0.04 * 160, rel=0.25)
    assert found["straggler"] == pytest.approx(
        sum(row.lost_s for row in report["verdicts"] if row.kind.startswith("straggler"))
    )
    waits_s = [rank["phases"]["communication"]["mean_s"] * 200 for rank in report["ranks"]]
    waited_s = sum(waits_s) / 4
    assert found["communication"] == pytest.approx(waited_s - 0.75 * found["straggler"], rel=0.02)
    assert "other" not in found


def test_price_is_multiplied_by_device_hours(
    simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(simulated), "--json", "--price-per-device-hour", "3600"]) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    costs = [each["cost"] for each in found["classes"].values()]
    assert sum(costs) == pytest.approx(4 * found["wall_s"])
    assert found["cost"] == pytest.approx(4 * found["wall_s"])
    assert main(["report", str(simulated), "--price-per-device-hour", "3600"]) == 0
    title, columns = capsys.readouterr().out.partition("Goodput (")[2].splitlines()[:2]
    total = format_rounded(found["cost"])
    assert f", cost {total})" in title
    assert columns.split()[-3:] == ["rank", "time", "cost"]

    page = tmp_path / "page.html"
    assert main(["report", str(simulated), "--html", str(page), "--price-per-device-hour", "3600"]) == 0  # fmt: skip
    assert f", cost {total})" in page.read_text()
