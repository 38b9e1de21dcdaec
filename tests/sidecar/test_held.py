"""Tests of how long verdicts last: with one sidecar, several sidecars, and a replay."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.support.findings import hang
from tests.support.in_memory import InMemoryExporter
from tests.support.long import long_except
from tests.support.ranks import HOST, Rank, make_run
from tests.support.reports import checked
from tests.support.simulations import simulation
from tests.support.tables import MS
from torchlens_perf.report.build import build_report
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.simulate.rings import SimulatedRank, Timeline
from torchlens_perf.simulate.simulation import Simulation, Topology
from torchlens_perf.verdicts import node_state

Held = dict[str, Any]


def record_run(run: RunDirectory, of: Simulation, steps: int, *, restarts: bool = False) -> None:
    """Record a simulated run that is read by one sidecar or by several ones in turn."""
    host = of.topology.host_name(0)
    anchor = Anchor(10**12, 1_700_000_000_000_000_000, 0)
    ranks = [
        SimulatedRank(run, host, of.topology, rank, anchor, "note")
        for rank in range(of.topology.rank_count)
    ]

    def sidecar() -> Sidecar:
        return Sidecar(run, host, None, lambda run, asked: None)

    reader = sidecar()
    for part in of.steps(steps):
        timeline = Timeline.from_steps(part)
        for rank in ranks:
            rank.write_steps(timeline)
        reader.read_rings()
        reader.count_records()
        reader.judge_ranks(time.monotonic())
        reader.save_records()
        if restarts:
            reader.close()
            reader = sidecar()
    for rank in ranks:
        rank.close()
    reader.read_rings()
    reader.count_records()
    reader.judge_ranks(time.monotonic(), final=True)
    reader.save_records()
    reader.close()


def validity_of_verdicts(run: RunDirectory) -> dict[tuple[str, int | None], Held]:
    """Return the validity of verdicts by kind and rank. Times are seconds since the first step."""
    report = checked(build_report(run.run_id, node_state.load_all(run)))
    began = datetime.datetime.fromisoformat(report["run"]["started"])
    found = {
        (row.kind, row.rank): {} if row.held is None else structs.asdict(row.held)
        for row in report["verdicts"]
    }
    for each in found.values():
        for name in ("since", "until"):
            if each.get(name):
                each[name] = (datetime.datetime.fromisoformat(each[name]) - began).total_seconds()
    return found


CASES = {
    "slow still": (("constant:rank=3,share=0.25,since=64",), None),
    "slow once": (("constant:rank=3,share=0.25,since=64,until=160",), None),
    "healthy": ((), None),
    "out of balance": (("constant:rank=2,share=0.4",), Topology(1, 1, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", long_except({"slow once", "healthy"}, CASES))
def test_restarts_and_replays_give_the_same_validity_of_verdicts(case: str, tmp_path: Path) -> None:
    """The validity is compared between one sidecar, restarts every 32 steps, and a replay."""
    faults, topology = CASES[case]
    runs = [make_run(tmp_path, f"{tmp_path.name}-{place}") for place in range(3)]
    for place, run in enumerate(runs):
        record_run(
            run, simulation(*faults, topology=topology, noise=0.05), 224, restarts=place == 1
        )
    (lost,) = runs[2].nodes.glob("*.json")
    if case != "out of balance":  # Records do not contain pipeline stages.
        lost.unlink()
        replay(runs[2], None)
    one, again, rebuilt = map(validity_of_verdicts, runs)

    assert one == rebuilt
    assert one.keys() == again.keys()
    assert any(each for each in one.values())
    for key, each in one.items():
        # After a restart, a detector needs some rows to find the end of a slow period, and finds it
        # less exactly.
        assert again[key].get("since_step") == pytest.approx(each.get("since_step"), abs=16)
        assert again[key].get("windows_judged", 0) == pytest.approx(
            each.get("windows_judged", 0), abs=2
        )
        assert again[key].get("windows_held", 0) == pytest.approx(
            each.get("windows_held", 0), abs=4
        )


def test_start_end_and_windows_of_a_verdict_match_the_simulated_fault(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_run(run, simulation("constant:rank=3,share=0.25,since=64,until=160", noise=0.05), 224)
    found = validity_of_verdicts(run)
    slow, no_straggler = found["straggler_ended", 3], found["none", None]

    assert (slow["since_step"], slow["until_step"]) == (
        pytest.approx(64, abs=2),
        pytest.approx(160, abs=8),
    )
    assert (slow["windows_held"], slow["windows_judged"], slow["window_steps"]) == (
        pytest.approx(12, abs=1), 28, 8,
    )  # fmt: skip
    assert slow["since"] == pytest.approx(64 * 0.21, rel=0.05)
    assert slow["until"] - slow["since"] == pytest.approx(96 * 0.26, rel=0.1)
    assert no_straggler["since_step"] == slow["until_step"]


def test_replay_raises_the_same_alerts_and_changes_no_finding(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_run(run, simulation("constant:rank=3,share=0.25,since=64,until=160", noise=0.05), 224)
    before, exporter = validity_of_verdicts(run), InMemoryExporter()
    replay(run, exporter)

    assert validity_of_verdicts(run) == before
    started, ended = [each for each in exporter.alerts if each.kind == "straggler"]
    assert (started.since_step, ended.until_step) == (
        before["straggler_ended", 3]["since_step"], before["straggler_ended", 3]["until_step"],
    )  # fmt: skip


def test_hang_is_recorded_without_an_exporter(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record stays after a restart of the sidecar and after the hang's end."""
    rank = Rank(run, 0, 1)
    rank.steps(20, forward=10.0)

    def sidecar() -> Sidecar:
        return Sidecar(run, HOST, None, lambda run, asked: None)

    def round_of(reader: Sidecar, hung: bool) -> Held:
        monkeypatch.setattr(
            reader.monitor.job._hangs, "hang", hang(20, since_s=12.0) if hung else None
        )
        monkeypatch.setattr(reader.monitor.job._hangs, "update_hang", lambda *_: None)
        reader.read_rings()
        reader.count_records()
        reader.judge_ranks(time.monotonic())
        reader.save_state()
        return {kind: each for (kind, _), each in validity_of_verdicts(run).items()}

    reader = sidecar()
    assert "hang" not in round_of(reader, hung=False)
    first = round_of(reader, hung=True)["hang"]
    reader.close()
    reader = sidecar()
    assert "hang_ended" not in round_of(reader, hung=False), "the new sidecar has not found it yet"
    again = round_of(reader, hung=True)["hang"]
    rank.clock.advance(60_000 * MS)
    rank.steps(3, forward=10.0)
    over = round_of(reader, hung=False)["hang_ended"]
    rank.close()
    reader.close()

    assert (first["since_step"], first["until_step"]) == (20, None)
    assert again == first
    assert (over["since_step"], over["until_step"], over["since"]) == (20, 21, first["since"])
