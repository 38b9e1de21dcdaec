"""Runs of simulated ranks: their files, the `simulate` command, and the verdicts.

Verdicts on files and on step bins in memory must be the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_memory import InMemoryExporter
from tests.support.ranks import Rank, make_run
from tests.support.simulations import judge_run, simulation, table_of
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.commands.cli import _build_parser
from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.errors import ConfigError, TorchlensPerfError
from torchlens_perf.report.build import build_report
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind, RingReader
from torchlens_perf.sidecar.host import process as host_signals
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.sidecar.start.process import acquire_lock
from torchlens_perf.simulate.rings import SimulatedRank, Timeline
from torchlens_perf.simulate.simulation import Topology
from torchlens_perf.store import segments
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.stragglers.findings import Findings


def verdicts(findings: Findings) -> list[tuple[Any, ...]]:
    """Return the content of each verdict. Costs are rounded, for comparisons of runs."""
    return [
        (e.rank, e.phase, e.since_step, e.until_step, e.named_step, round(e.excess_ns / 1e5))
        for e in findings.episodes
    ]


def test_recorded_steps_equal_the_simulated_ones(tmp_path: Path) -> None:
    """Durations, parts, workload and flags in the ring file are exact to the nanosecond.

    The groups of the mesh are described as by a real rank.
    """
    run, topology = make_run(tmp_path), Topology(2, 2, 2, node_size=2)
    steps = simulation(
        "variable_length:reported=yes", "pauses:share=0.2,every=4", topology=topology, noise=0.5
    ).block(0)  # fmt: skip
    timeline = Timeline.from_steps(steps)
    assert (
        min(timeline.gradients_ns.min(), timeline.norm_ns.min(), timeline.tensor_wait_ns.min()) >= 0
    )
    for rank in range(topology.rank_count):
        simulated = SimulatedRank(
            run, "node-0000", topology, rank, Anchor(10**12, 10**18, 0), "note"
        )
        path = run.registered_rings("node-0000")[-1]
        # Ring files are not in shared memory, where an interrupted simulation would leave them.
        assert path.is_relative_to(run.path)
        simulated.write_steps(timeline)
        simulated.close()
        reader = RingReader(path)
        table, expected = (
            assemble_steps(reader.read_records(final=True).records),
            table_of(steps, rank, 10**12),
        )
        described = {group["description"] for group in reader.read_metadata()["groups"].values()}
        reader.close()

        assert described == {"default_pg", "mesh_tp", "mesh_dp", "mesh_pp"}
        for name in ("step", "start_ns", "duration_ns", "workload", "flags"):
            assert (getattr(table, name) == getattr(expected, name)).all(), name
        # Each division of a part may round by a nanosecond.
        close = np.abs(table.parts_ns - expected.parts_ns) <= 8
        assert close.all()


def test_last_rank_to_arrive_has_the_shortest_collective(tmp_path: Path) -> None:
    """Records of a collective are matched by group and sequence number.

    All members leave a collective together.
    """
    topology = Topology(2, 2)
    run = make_run(tmp_path)
    steps = simulation(
        "constant:rank=2,share=0.5,phase=backward", topology=topology, noise=0.02
    ).block(0)
    waited: dict[str, dict[int, np.ndarray]] = {}
    left: dict[str, list[np.ndarray]] = {}
    for rank in range(4):
        simulated = SimulatedRank(
            run, "node-0000", topology, rank, Anchor(10**12, 10**18, 0), "note"
        )
        path = run.registered_rings("node-0000")[-1]
        simulated.write_steps(Timeline.from_steps(steps))
        simulated.close()
        reader = RingReader(path)
        records, names = reader.read_records(final=True).records, list(reader.names())
        reader.close()
        for name_id in np.unique(records["name_id"][records["kind"] == Kind.COLLECTIVE]):
            chosen = records[(records["kind"] == Kind.COLLECTIVE) & (records["name_id"] == name_id)]
            assert (chosen["value1"] == np.arange(len(chosen))).all()
            waited.setdefault(names[name_id], {})[rank] = chosen["duration_ns"]
            left.setdefault(names[name_id], []).append(chosen["start_ns"] + chosen["duration_ns"])

    in_tensor_group = waited["allreduce group=tp-2 dtype=bfloat16"]
    # Every second collective of a tensor-parallel group is in backward, where rank 2 is slow.
    assert (in_tensor_group[2][1::2] < in_tensor_group[3][1::2]).all()
    in_data_group = waited["allreduce group=dp-0 dtype=bfloat16"]
    assert (in_data_group[2] < in_data_group[0]).all()
    assert set(waited["allreduce group=0 dtype=bfloat16"]) == {0, 1, 2, 3}
    for group in ("tp-2", "dp-0", "dp-1"):
        first, second = left[f"allreduce group={group} dtype=bfloat16"]
        assert np.abs(first - second).max() < 100, group


def test_simulated_metadata_has_the_same_keys_as_that_of_a_real_rank(tmp_path: Path) -> None:
    """A key that is added to the recorder must be added to simulated ranks too."""
    run = make_run(tmp_path)
    real = Rank(run, 0)
    simulated = SimulatedRank(run, "node-0000", Topology(2), 1, Anchor(1, 2, 3), "note")
    metadata = []
    for path in (real.ring_path, run.registered_rings("node-0000")[-1]):
        reader = RingReader(path)
        metadata.append(reader.read_metadata())
        reader.close()
    real.close()
    simulated.close()

    assert metadata[0].keys() == metadata[1].keys()
    assert metadata[0]["identity"].keys() == metadata[1]["identity"].keys()
    assert metadata[0]["settings"].keys() == metadata[1]["settings"].keys()


@pytest.mark.parametrize(
    "fault",
    ["constant:rank=3,share=0.1,phase=forward,since=64", "moving:ranks=1+4,share=0.1,every=70", ""],
)
def test_simulated_files_and_bins_in_memory_have_the_same_verdicts(
    fault: str, tmp_path: Path
) -> None:
    """One run uses ring files and the sidecar; the other one uses the detector directly."""
    run = make_run(tmp_path)
    faults = [fault] if fault else []
    record_simulation(simulation(*faults, noise=0.05), 160, run, "note")
    from_files = node_state.load_all(run)[0].findings
    from_rows = judge_run(simulation(*faults, noise=0.05), 160)

    assert verdicts(from_files) == verdicts(from_rows)
    assert bool(verdicts(from_files)) == bool(fault)
    assert from_files.rows == from_rows.rows


def test_slower_modules_of_a_slow_rank_are_found_by_the_sidecar(tmp_path: Path) -> None:
    """The tables of a report are not needed."""
    run = make_run(tmp_path)
    record_simulation(
        simulation("constant:rank=3,share=0.25,phase=forward", noise=0.05), 120, run, "note"
    )
    state = node_state.load_all(run)[0]
    (group,) = state.findings.groups
    names = next(iter(state.processes.values())).statistics.modules

    assert (group.lead.rank, len(group.slower_modules_ns)) == (3, 3)
    assert group.slower_modules_ns.keys() < names.keys()
    # The fault slows all modules by the same share.
    assert min(group.slower_modules_ns.values()) > 0.05 * 200e6 / len(names)


@pytest.mark.long
def test_all_steps_recorded_by_a_simulation_are_stored(tmp_path: Path) -> None:
    """No record is lost, and no ring file remains."""
    run = make_run(tmp_path)
    # A ring file has room for fewer steps than these.
    record_simulation(simulation(topology=Topology(4, 2, 2, node_size=8)), 300, run, "note")
    state = node_state.load_all(run)[0]

    assert {p.identity.rank for p in state.processes.values()} == set(range(16))
    assert all(
        p.statistics.counted_steps == 300 and p.statistics.lost == 0
        for p in state.processes.values()
    )
    assert {p.identity.host for p in state.processes.values()} == {"node-0000", "node-0001"}
    kept = sum(len(records) for _, records, _, _ in segments.read_chunks(run, "node-0000"))
    assert kept == sum(p.statistics.records for p in state.processes.values())
    assert not list(tmp_path.rglob("*.ring"))


def test_cpu_wait_of_the_simulator_is_not_charged_to_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel's numbers are those of the simulating process and not of a simulated rank."""
    # A simulation is short: without this, the sidecar might not sample the process at all.
    monkeypatch.setattr(host_signals, "_MIN_INTERVAL_S", 0.0)
    run = make_run(tmp_path)
    record_simulation(simulation(topology=Topology(2)), 300, run, "note")
    state = node_state.load_all(run)[0]

    assert [process.cpu_wait for process in state.processes.values()] == [[0.0, 0.0]] * 2


def test_slow_link_is_found_in_simulated_files(tmp_path: Path) -> None:
    """Collectives of simulated ranks are matched. The verdict is a slow group, not a slow rank."""
    run = make_run(tmp_path)
    record_simulation(simulation("link:rank=3,share=0.2", topology=Topology(4, 4)), 96, run, "note")
    report = build_report(run.run_id, node_state.load_all(run))

    assert report["verdicts"][0].kind == "slow_link"
    assert "3,7,11,15" in report["verdicts"][0].sentence
    assert not [verdict for verdict in report["verdicts"] if verdict.kind == "straggler"]


@pytest.mark.parametrize(
    ("fault", "topology", "kind", "where"),
    [
        ("link:rank=3,share=0.2", Topology(4, 4), "slow_link", (3, 7, 11, 15)),
        ("constant:rank=2,share=0.4", Topology(1, 1, 3), "imbalance", (2,)),
    ],
)
def test_slow_link_or_imbalance_raises_one_alert(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    topology: Topology,
    kind: str,
    where: tuple[int, ...],
) -> None:
    """A replay exports the alert with the same id."""
    live, again, run = InMemoryExporter(), InMemoryExporter(), make_run(tmp_path)
    monkeypatch.setattr(
        "torchlens_perf.exporters.otlp_environment.create_exporter_from_environment",
        lambda *_: live,
    )
    record_simulation(simulation(fault, topology=topology), 96, run, "note")
    replay(run, again)
    report = build_report(run.run_id, node_state.load_all(run))
    (verdict,) = [each for each in report["verdicts"] if each.kind == kind]
    (alert,) = [each for each in live.alerts if each.kind == kind]

    assert (alert.change, alert.ranks) == ("started", where)
    assert alert.text.partition(":")[0] == verdict.sentence.partition(":")[0]
    assert alert.cost_s_per_step == pytest.approx(verdict.cost_s_per_step, rel=0.5)
    assert [each.id for each in again.alerts if each.kind == kind] == [alert.id]


def command(*arguments: str) -> int:
    """Run `simulate` as the command line does, but do not catch its errors."""
    options = _build_parser().parse_args(["simulate", *arguments])
    code: int = options.command(options)
    return code


def test_simulate_command_writes_a_run_and_its_report(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report has the planted rank and says that the run is simulated."""
    out = tmp_path / f"{tmp_path.name}-run"
    fault = "constant:rank=3,share=0.25,phase=forward,since=40"
    assert (
        command("--topology", "dp=4,tp=2", "--fault", fault, "--steps", "120", "--out", str(out))
        == 0
    )

    printed = capsys.readouterr().out
    assert "SLOW RANK   rank 3 (node-0000)   forward" in printed
    assert "since step 40" in printed
    text = RunDirectory(out).report.read_text()
    assert f"simulated with --fault {fault}" in text
    assert "Rank 3" in text


def test_slow_rank_of_hundreds_of_simulated_ranks_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each pipeline stage is judged separately."""
    fault = "constant:rank=300,share=0.08,since=64"
    assert (
        command(
            "--rows",
            "--topology",
            "dp=32,tp=4,pp=4",
            "--fault",
            fault,
            "--steps",
            "128",
            "--noise",
            "0.05",
        )
        == 0
    )
    named = capsys.readouterr().out

    assert "Rank 300 (node-0037) is slow in computing" in named
    assert re.search(
        r"found +rank 300, compute, since step 6\d, costs [\d.]+ ms a step \(verdict straggler\)",
        named,
    )
    assert "planted faults: 1 of 1 found" in named
    assert "not planted, but named" not in named


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ranks", "8", "--steps", "8"], "8 steps are too few"),
        (["--ranks", "1"], "no two ranks do the same work"),
    ],
)
def test_simulate_command_gives_the_reason_when_nothing_is_comparable(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--rows", *arguments) == 0
    printed = capsys.readouterr().out

    assert printed.startswith(f"Nothing could be compared: {why}.\n")
    assert "inf" not in printed
    assert "Smallest detectable slowdown" not in printed


def test_slow_node_costs_as_much_as_all_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The cost is the same during and after the fault. The text ends with the last slow step."""
    assert (
        command(
            "--rows", "--ranks", "32", "--fault", "node:node=1,share=0.1,since=64", "--spread", "0"
        )
        == 0
    )
    now = capsys.readouterr().out
    fault = "node:node=1,share=0.1,since=64,until=128"
    assert command("--rows", "--ranks", "32", "--fault", fault, "--noise", "0.01") == 0
    over = capsys.readouterr().out

    (cost_ms,) = re.findall(
        r"^Node node-0001 is slow .* costs the job ([\d.]+) ms", now, re.MULTILINE
    )
    assert float(cost_ms) > 15
    ended = (
        r"^Rank \d+ was slow in computing .* from step 64 to step 12[37]: .* cost the job"
        r" ([\d.]+) ms"
    )
    costs_ms = re.findall(ended, over, re.MULTILINE)
    assert len(costs_ms) == 8
    assert min(map(float, costs_ms)) > 15


def test_short_steps_are_joined_into_step_bins(capsys: pytest.CaptureFixture[str]) -> None:
    """About sixteen steps of 2 ms are one bin, as in a real run.

    An incomplete last bin is dropped.
    """
    assert (
        command(
            "--rows", "--step-ms", "2", "--steps", "708", "--fault", "constant:rank=1,share=0.2"
        )
        == 0
    )

    assert "Rank 1 (node-0000) is slow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "--fault", "constant:rank=1"], "constant needs share"),
        (
            ["--rows", "--fault", "konstant:rank=1,share=1"],
            "unknown fault 'konstant': did you mean 'constant'? Faults: ",
        ),
        (["--rows", "--fault", "constant:rank=1,share=much"], "share=much is not a number"),
        (["--rows", "--fault", "constant:rank=8,share=1"], "rank 8 is not among the job's 8 ranks"),
        (["--rows", "--fault", "constant:rank=1,share=-1"], "share must be above 0"),
        (["--rows", "--fault", "constant:rank=1,share=1,phase=lunch"], "phase must be one of"),
        (
            ["--rows", "--fault", "constant:rank=1,share=1,when=now"],
            "unknown name 'when'. Names of constant: since, ",
        ),
        (["--rows", "--fault", "moving:ranks=1-2,share=1"], "ranks like 1+2+3"),
        (["--rows", "--fault", "moving:ranks=1+2,share=1,every=0"], "every must be 1 step or more"),
        (["--rows", "--fault", "intermittent:rank=1,share=1,slow=5"], "slow must be 1 to 4"),
        (["--rows", "--fault", "node:node=1,share=1"], "node 1 is not among the job's 1 nodes"),
        (["--rows", "--fault", "link:rank=1,share=1,dimension=xp"], "dimension must be dp or tp"),
        (
            ["--rows", "--fault", "variable_length:reported=maybe"],
            "reported=maybe is not yes or no",
        ),
        (["--rows", "--topology", "dp=3,x=2"], "expected sizes such as"),
        (["--rows", "--topology", "dp=0"], "dp must be 1 or more"),
        (["--rows", "--ranks", "0"], "--ranks must be 1 or more, got 0"),
        (["--rows", "--topology", "dp=3", "--ranks", "4"], "do not agree"),
        (["--rows", "--noise", "-1"], "noise must be"),
        (["--rows", "--noise", "nan"], "noise must be"),
        (["--rows", "--spread", "2"], "spread must be"),
        (["--rows", "--step-ms", "0"], "a step's work must be"),
        (["--rows", "--steps", "0"], "--steps must be"),
        (["--rows", "--seed", "-1"], "seed must be 0 or more, got -1"),
        (["--ranks", "1025"], "at most 1024 ranks"),
        ([], "--out DIR is missing"),
    ],
)
def test_wrong_arguments_of_simulate_raise_an_error_of_one_line(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        command(*arguments)

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_runs_with_one_name_are_simulated_at_the_same_time(tmp_path: Path) -> None:
    """Their ids are equal. A sidecar of a recorded run may have the same id, too."""
    runs = [RunDirectory(tmp_path / folder / "run") for folder in ("one", "other")]
    recorded = acquire_lock(runs[0])
    for run in runs:
        run.create()
    small = simulation(topology=Topology(2))
    record_simulation(
        small,
        8,
        runs[0],
        "simulated",
        advanced=lambda *_: record_simulation(small, 8, runs[1], "simulated"),
    )
    recorded.remove()

    for run in runs:
        assert load_report(run)["steps"]["count"] == 8
        assert not list(run.path.glob("*.lock"))


def test_simulate_does_not_overwrite_a_run_directory(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(
        TorchlensPerfError, match="already is a run directory: choose another --out"
    ):
        command("--out", str(run.path))


def test_simulated_step_ends_at_the_same_time_on_all_hosts(tmp_path: Path) -> None:
    """The times are equal both by the sidecar's monotonic clock and by the wall clock."""
    run = make_run(tmp_path)
    record_simulation(simulation(), 20, run, "note")
    times = {}
    for origin, records, _, _ in segments.read_chunks(run, "node-0000"):
        ends = records[records["kind"] == Kind.STEP]
        times[origin.rank] = (
            int(ends["start_ns"][5]),
            int(ends["start_ns"][5]) - origin.anchor.monotonic_ns,
        )

    assert len({monotonic for monotonic, _ in times.values()}) == 1
    assert len({since for _, since in times.values()}) == 1


def test_simulate_options_rows_and_out_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rows writes no files: remove --rows or --out"):
        command("--rows", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
