"""The JSON schema of the report: the command prints it, and real reports conform to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report import test_device_times as device
from tests.report import test_memory_table as memory
from tests.report.test_report import WORK, report_on
from tests.sidecar.telemetry.test_infiniband import port
from tests.sidecar.telemetry.test_log import FIRST, SECOND_GPU, Rig
from tests.support.collectives import Issued, joined
from tests.support.facts import take_facts
from tests.support.findings import episode, findings
from tests.support.ranks import HOST, Rank
from tests.support.reports import as_json, checked, problem
from tests.support.simulations import simulation
from tests.support.tables import MS, mixed_table
from tests.verdicts.words.test_bottleneck import BASE, state_of
from torchlens_perf.commands.cli import main
from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.report import report_json
from torchlens_perf.report.build import build_report
from torchlens_perf.report.captures import capture_rows
from torchlens_perf.roles.evidence import SlowIterationEvidence
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.failure import Failure
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.run.verdicts import Alert
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.simulate.simulation import Topology
from torchlens_perf.verdicts import node_state, slow_links
from torchlens_perf.verdicts.finding_log import Finding, FindingRecords
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import (
    Cause,
    Diagnosis,
    StageImbalance,
    StragglerGroup,
)
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words import (
    bottleneck,
    device_pace,
    evidence,
    growth,
    long_steps,
    oom,
    past,
    run_state,
    startup,
    stragglers,
)
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack


def test_schema_command_prints_a_complete_schema_without_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    """All fields are required, and all references exist."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    top = schema["$defs"][schema["$ref"].rpartition("/")[2]]

    always = set(build_report("run", []))
    assert (set(top["required"]), set(top["properties"])) == (always, {*always, "iterations"})
    assert top["properties"]["ranks"]["items"] == {"$ref": "#/$defs/Rank"}
    assert schema["$defs"]["Rank"]["properties"]["step_s"] == {"$ref": "#/$defs/Distribution"}
    assert {"type": "null"} in schema["$defs"]["Distribution"]["properties"]["p50_s"]["anyOf"]
    kinds = [each["properties"]["kind"]["enum"] for each in schema["$defs"]["Verdict"]["anyOf"]]
    assert kinds == [report_json.kinds_with(each) for each in report_json.EVIDENCE]


def test_schema_check_finds_wrong_fields() -> None:
    """The examples have an additional field, a missing one, and one of another type."""
    report = build_report("run", [])
    wrong_type = {**report, "steps": {**report["steps"], "count": "0"}}
    wrong = [
        {**report, "more": 1},
        {key: report[key] for key in report if key != "links"},
        wrong_type,
    ]
    for each in wrong:
        with pytest.raises(AssertionError):
            checked(each)


def node(
    parts: dict[str, Any] | None = None, ranks: int = 1, steps: int = 60, **changed: Any
) -> NodeState:
    """Return a node with ranks whose steps have the given parts in ms.

    `changed` has other field values of the node and its processes. `device_ms` has the device time
    of each part of a step. `caught_up` is the number of passes, out of 10, that the device ended
    shortly after the host.
    """
    of_node = {
        each.name: changed.pop(each.name)
        for each in dataclasses.fields(NodeState)
        if each.name in changed
    }
    other_threads_ns = changed.pop("other_threads_ns", {})
    device_ms, caught_up = changed.pop("device_ms", {}), changed.pop("caught_up", 0)
    states = [
        state_of(rank, ranks, [{**BASE, **(parts or {})} for _ in range(steps)])
        for rank in range(ranks)
    ]
    for state in states:
        state.statistics.other_threads_ns = other_threads_ns
        if device_ms:
            state.statistics.device_mix.add_steps(mixed_table([device_ms] * 10))
            step_ns = np.full(10, sum(device_ms.values()) * MS, np.int64)
            for sketch in (state.statistics.device.judged, state.statistics.device.work):
                sketch.add(step_ns)
            state.statistics.device.phases["step"] = state.statistics.device.judged
            state.judged_by = DEVICE
        state.statistics.device.behind.add(np.full(10, MS, np.int64))
        state.statistics.device.caught_up = caught_up
    facts = take_facts(changed)
    processes = {
        state.identity.key: dataclasses.replace(state, facts=facts, **changed) for state in states
    }
    return NodeState(HOST, processes, **of_node)


def uneven_node() -> NodeState:
    """Return a node whose rank 0 ended after 40 steps, and rank 1 after 70 steps."""
    states = [state_of(rank, 2, [BASE] * (40 + 30 * rank)) for rank in range(2)]
    return NodeState(HOST, {state.identity.key: state for state in states})


def judged(slow: Episode) -> NodeState:
    """Return a node that has found a slow rank, with or without a known cause."""
    why = Diagnosis(
        (Cause("gc", 0.5, {"gc_share": 0.5}, {}),),
        ("GPUs",),
        (),
        {"x": 1.0},
        {},
    )
    if slow.is_over:
        return node(ranks=2, findings=findings(slow, diagnoses=((slow.key, why),)))
    group = StragglerGroup("rank", "", (slow.rank,), slow, diagnosis=why)
    return node(ranks=2, findings=findings(slow, groups=(group,)))


def noted(kind: str) -> FindingRecords:
    """Return records of a run with an ended finding of the given kind."""
    alert = Alert("id", "about", kind, "ended", "It is slow.", "see.", 9_000_000, 0, ranks=(1,))
    hung = (
        HangEvidence("missing", 60.0, 20, (0,), {}, "", "", "see.", ranks=(1,))
        if kind == "hang"
        else None
    )
    return FindingRecords(0, "", [Finding(alert, 20, 5_000_000, 31, 9_000_000, hang=hung)])


def for_a_while(parts: dict[str, Any], since: int = 40, steps: int = 40) -> NodeState:
    """Return a node whose steps have the given parts in some of its windows."""
    made = [
        {**BASE, "cpu": 0.0, **(parts if since <= step < since + steps else {})}
        for step in range(160)
    ]
    return NodeState(HOST, {"0": state_of(0, 1, made)})


def linked(run: RunDirectory) -> NodeState:
    """Return a node that has found a slow link."""
    record_simulation(simulation("link:rank=3,share=0.2", topology=Topology(4, 4)), 96, run, "note")
    (state,) = node_state.load_all(run)
    return state


CPU = {"host": 40.0, "cpu": 30.0, "cpu_in": "host"}
ONE_LONG = [*[dict(BASE)] * 50, {**BASE, "host": 901.0, "flags": Flag.EVALUATION}]
GROWING = [{**BASE, "host": 1.02**step} for step in range(160)]
HANG = HangEvidence(
    "dead", 90.0, 10, (1,), {1: RankStack(("train.py:3",), "")}, "It hangs", "", ranks=(0,)
)
FAILURE: Failure = {
    "type": "torch.OutOfMemoryError",
    "message": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "where": "train.py:42 in loss_fn",
    "step": 60,
    "phase": "forward",
    "module": "blocks.3",
    "exit_code": None,
    "lost_peer": False,
    "after_watch": False,
    "unix_ns": 0,
}
IMBALANCE = StageImbalance("pp 1", (0, 1), 2e6, 1e6, 2)
# For each kind of verdict and each class of evidence, the state of a node whose report has such a
# verdict.
STATES: dict[tuple[str, type], Callable[[RunDirectory], NodeState]] = {
    ("straggler", stragglers.StragglerEvidence): lambda run: judged(episode(1)),
    ("straggler_transient", stragglers.PastStragglerEvidence): lambda run: judged(
        episode(1, until=110)
    ),
    ("straggler_ended", stragglers.PastStragglerEvidence): lambda run: judged(
        episode(1, until=180)
    ),
    ("imbalance", evidence.ImbalanceEvidence): lambda run: node(
        findings=findings(imbalance=IMBALANCE)
    ),
    ("slow_link", slow_links.SlowLinkEvidence): linked,
    ("hang", HangEvidence): lambda run: node(ended="", hang=HANG),
    ("out_of_memory", oom.OutOfMemoryEvidence): lambda run: node(
        out_of_memory=memory.oom(step=99, file="f", rank=0, host="h")
    ),
    ("died", run_state.DiedEvidence): lambda run: node(ended="died"),
    ("failed", run_state.FailedEvidence): lambda run: node(ended="failed", failure=FAILURE),
    ("startup", startup.StartupEvidence): lambda run: node(process_began_ns=-200_000_000_000),
    ("growing_steps", growth.GrowthEvidence): lambda run: NodeState(
        HOST, {"0": state_of(0, 1, GROWING)}
    ),
    ("uneven_steps", run_state.UnevenStepsEvidence): lambda run: uneven_node(),
    ("not_known", evidence.DeepSpansEvidence): lambda run: node({"host": 30.0}, too_deep=5),
    ("compute_bound", bottleneck.TypicalStepEvidence): lambda run: node(),
    ("compute_bound", bottleneck.DeviceStepEvidence): lambda run: node(
        device_ms={"backward": 19.0, "host": 1.0}
    ),
    ("data_bound", bottleneck.TypicalStepEvidence): lambda run: node({"data": 30.0}),
    ("data_bound", bottleneck.DeviceStepEvidence): lambda run: node(
        device_ms={"forward": 4.0, "data": 30.0}
    ),
    ("communication_bound", bottleneck.TypicalStepEvidence): lambda run: node(
        {"communication": 30.0}
    ),
    ("communication_bound", bottleneck.DeviceStepEvidence): lambda run: node(
        device_ms={"forward": 4.0, "communication": 30.0}
    ),
    ("host_bound", bottleneck.TypicalStepEvidence): lambda run: node({"host": 30.0}),
    ("host_bound", bottleneck.DeviceStepEvidence): lambda run: node(
        device_ms={"forward": 4.0, "host": 30.0}
    ),
    ("host_bound", device_pace.LaunchBoundEvidence): lambda run: node(
        device_ms={"forward": 4.0}, caught_up=10
    ),
    ("lack_of_cpu", bottleneck.TypicalStepEvidence): lambda run: node(
        {"forward": 40.0, "cpu": 30.0}
    ),
    ("lack_of_cpu", bottleneck.SecondLimitEvidence): lambda run: node(
        {"data": 60.0, "cpu": 45.0, "cpu_in": "data"}
    ),
    ("data_bound", bottleneck.SecondLimitEvidence): lambda run: node(
        {"data": 20.0, "forward": 40.0, "cpu": 30.0}
    ),
    ("host_bound", bottleneck.SecondLimitEvidence): lambda run: node(
        {"host": 20.0, "forward": 40.0, "cpu": 30.0}
    ),
    ("lack_of_cpu", bottleneck.DeviceStepEvidence): lambda run: node(
        CPU, device_ms={"forward": 4.0, "host": 40.0}
    ),
    ("lack_of_cpu", bottleneck.SampledCpuLackEvidence): lambda run: node(cpu_wait=[12.0, 20.0]),
    ("long_steps", long_steps.LongStepsEvidence): lambda run: NodeState(
        HOST, {"0": state_of(0, 1, ONE_LONG)}
    ),
    ("not_known", evidence.UntimedDeviceEvidence): lambda run: node(compute_device="xpu"),
    ("not_known", evidence.GraphReplayEvidence): lambda run: node(
        device_ms={"forward": 0.1, "host": 40.0}, device={"captured": 4}
    ),
    ("not_known", evidence.OtherThreadsEvidence): lambda run: node(
        {"host": 30.0}, other_threads_ns={"forward": 10**9}
    ),
    ("none", evidence.NoSlowRankEvidence): lambda run: node(ranks=2, findings=findings()),
    ("none", evidence.NotComparedEvidence): lambda run: node(ranks=2, steps=12),
    ("none", evidence.WarmUpEvidence): lambda run: node(steps=2),
    ("not_compared", evidence.NotComparedEvidence): lambda run: node(ranks=2),
    ("no_steps", evidence.NoStepsEvidence): lambda run: node(steps=0),
    **{
        (f"{kind}_ended", evidence.PastEvidence): lambda run, kind=kind: node(records=noted(kind))
        for kind in ("slow_link", "imbalance")
    },
    ("hang_ended", HangEvidence): lambda run: node(records=noted("hang")),
    ("compute_bound", past.RunPartEvidence): lambda run: for_a_while(
        {"data": 30.0}, since=0, steps=100
    ),
    ("data_bound", past.RunPartEvidence): lambda run: for_a_while({"data": 30.0}, since=120),
    ("data_bound_ended", past.RunPartEvidence): lambda run: for_a_while({"data": 30.0}),
    ("communication_bound", past.RunPartEvidence): lambda run: for_a_while(
        {"communication": 30.0}, since=120
    ),
    ("communication_bound_ended", past.RunPartEvidence): lambda run: for_a_while(
        {"communication": 30.0}
    ),
    ("host_bound", past.RunPartEvidence): lambda run: for_a_while({"host": 30.0}, since=120),
    ("host_bound_ended", past.RunPartEvidence): lambda run: for_a_while({"host": 30.0}),
    ("lack_of_cpu", past.RunPartEvidence): lambda run: for_a_while(
        {"forward": 40.0, "cpu": 30.0}, since=120
    ),
    ("lack_of_cpu_ended", past.RunPartEvidence): lambda run: for_a_while(
        {"forward": 40.0, "cpu": 30.0}
    ),
}


def test_every_kind_of_verdict_has_an_example() -> None:
    of_events = {("slow_iteration", SlowIterationEvidence)}  # tests/roles/test_report.py
    assert set(STATES) | of_events == {
        (kind, of) for of in report_json.EVIDENCE for kind in report_json.kinds_with(of)
    }


@pytest.mark.parametrize(("kind", "of"), STATES)
def test_each_kind_of_verdict_conforms_to_its_schema_only(
    run: RunDirectory, kind: str, of: Any
) -> None:
    """A verdict has exactly the fields of its evidence, and conforms to no other kind."""
    report = checked(build_report("run", [STATES[kind, of](run)]))
    places = enumerate(report["verdicts"])
    place = next(at for at, row in places if row.kind == kind and isinstance(row.evidence, of))
    value = as_json(report)
    row = value["verdicts"][place]
    needed = set(row["evidence"])
    less = [
        {key: row["evidence"][key] for key in row["evidence"] if key != without}
        for without in needed
    ]
    wrong = [
        *({**row, "evidence": each} for each in less),
        {**row, "evidence": {**row["evidence"], "more": 1}},
        {**row, "kind": "no_such_kind"},
        {**row, "kind": "no_steps" if of is HangEvidence else "hang"},
    ]
    for each in wrong:
        value["verdicts"][place] = each
        assert problem(value), each


def test_all_fields_of_a_report_are_always_present() -> None:
    """Exceptions are fields that tables of earlier recorders lack, and jobs without roles."""
    definitions = report_json.build_schema()["$defs"]
    lacking = {
        name: set(each["properties"]) - set(each["required"]) for name, each in definitions.items()
    }
    optional = {"device_bytes", "caught", "earlier", "file"}

    assert {name: each for name, each in lacking.items() if each} == {
        "OutOfMemory": optional,
        "RoleReport": {"iterations"},
    }


def test_report_on_an_empty_run_conforms_to_the_schema(run: RunDirectory) -> None:
    """All values are null or empty lists, and there is a rank without a step."""
    checked(build_report("run", []))
    report_on(run, [Rank(run, 0, 1)])


def test_report_on_a_slow_rank_conforms_to_the_schema(run: RunDirectory) -> None:
    """The report has ranks with phases, modules, sections, a heat map, a trend, long steps, and a
    verdict.
    """
    ranks = [
        Rank(run, rank, identity={"attributes": {"k8s.pod.name": f"pod-{rank}"}})
        for rank in range(2)
    ]
    for rank, extra in zip(ranks, (0, 8), strict=True):
        recorder, clock, intern = rank.session.recorder, rank.clock, rank.session.intern
        for step in range(100):
            recorder.begin(Kind.FORWARD, intern("forward Net"))
            recorder.begin(Kind.MODULE, intern("block"))
            clock.advance((4 + extra) * MS)
            recorder.end(Kind.MODULE, intern("block"))
            recorder.end(Kind.FORWARD, intern("forward Net"))
            recorder.record_span(Kind.MODULE_BACKWARD, intern("block"), 0, 5 * MS)
            recorder.record_span(Kind.SECTION, intern("log"), 0, 5)
            rank.steps(1, **{**WORK, "data": 60 if step % 20 == 7 else 1})
    report = report_on(run, ranks)

    assert report["verdicts"][0].kind == "straggler"
    assert report["verdicts"][0].where == {"host.name": HOST, "k8s.pod.name": "pod-1"}
    assert report["modules"][0]["backward_s"]
    assert report["sections"]
    assert report["heat"]["ranks"][1]["slow"]
    assert report["steps"]["trend"]
    assert report["steps"]["long"]


@pytest.mark.parametrize(
    ("fault", "topology", "kind"),
    [
        ("constant:rank=2,share=0.4", None, "straggler"),
        ("constant:rank=2,share=0.4", Topology(1, 1, 3), "imbalance"),
        ("link:rank=3,share=0.2", Topology(4, 4), "slow_link"),
    ],
)
def test_report_on_a_simulated_run_conforms_to_the_schema(
    run: RunDirectory, fault: str, topology: Topology | None, kind: str
) -> None:
    """The run has many ranks, joined collectives, and a finding of the given kind."""
    record_simulation(simulation(fault, topology=topology), 96, run, "note")
    report = checked(build_report(run.run_id, node_state.load_all(run)))

    assert report["verdicts"][0].kind == kind
    assert any(row["busbw"] for row in report["collectives"])


def test_messages_between_two_ranks_conform_to_the_schema() -> None:
    """The row of collectives is about a pair of ranks, and not about a group."""
    issued = {
        0: [Issued("send group=0 dtype=float16 peer=1", 0, 90)],
        1: [Issued("recv group=0 dtype=float16 peer=0", 0, 20)],
    }
    report = checked(build_report("run", [NodeState(HOST, join=joined(issued))]))

    assert report["collectives"][0]["pair"] == [0, 1]


def test_report_with_device_times_conforms_to_the_schema(run: RunDirectory) -> None:
    """Phases, modules, sections and device sections have times by the device's clock."""
    ranks = [device.Gpu(run, rank) for rank in range(2)]
    for rank in ranks:
        rank.session.facts.device = {"clock": "CUDA events", "error_ns": 4000}
        rank.session.publish()
        rank.timed_steps(40, 30 * MS)
        for kind, name in ((Kind.MODULE, "block"), (Kind.SECTION, "augment")):
            rank.session.recorder.record_span(kind, rank.session.intern(name), 0, 5)
            for step in range(35, 40):
                rank.late(kind, name, step, 7 * MS, 30 * MS)
        rank.stamped("decode", [MS] * 500)
        rank.timed_steps(1, 30 * MS)
    recorder = ranks[0].session.recorder
    recorder.record_completed(
        int(Kind.MERGED), ranks[0].session.intern("decode"), recorder.step, MS, MS, 0, 2, 1
    )
    report = device.report_on(run, ranks)

    assert report["ranks"][0]["device"]["error_s"] == 4e-6
    assert report["modules"][0]["device_own_s_per_step"]
    assert report["sections"][0]["device_s"]
    assert report["device_sections"][0]["over_all_ranks"]


def test_report_with_memory_readings_conforms_to_the_schema(run: RunDirectory) -> None:
    """The readings show growth and retries, and a rank ran out of memory."""
    rank = Rank(run, 0, 1, ring_records=16384)
    for i in range(60):
        memory.mark_memory(
            rank, allocated=((20 + i) << 27, 80 << 27), reserved=(90 << 27, 95 << 27), inactive=(1 << 27, 2 << 27),
            alloc_retries=i, ooms=1, limit=100 << 27,
        )  # fmt: skip
        rank.steps(16, **WORK)
    memory.ran_out(run, rank, step=960)
    report = report_on(run, [rank])

    assert report["ranks"][0]["memory"]["growth"]
    assert report["ranks"][0]["memory"]["device"]["retries_in"]
    assert report["ranks"][0]["out_of_memory"]
    assert report["verdicts"][0].kind == "out_of_memory"


def test_report_with_hardware_readings_conforms_to_the_schema(
    run: RunDirectory, tmp_path: Path
) -> None:
    """One GPU has all values, one has almost none, and a network port has errors."""
    folder, rig = port(tmp_path / "infiniband"), Rig(run, tmp_path / "infiniband")
    rig.gpus.values = {
        FIRST: {
            "sm_clock_hz": 99 * 10**7, "sm_clock_max_hz": 198 * 10**7, "memory_clock_hz": 10**9, "clock_reasons": 4,
            "power_w": 300.4, "power_limit_w": 700.0, "temperature_c": 88, "memory_temperature_c": 90, "busy": 1.0,
            "memory_used_bytes": 5, "memory_total_bytes": 9, "sm_active": 0.5, "sm_occupancy": 0.5,
            "tensor_active": 0.25, "dram_active": 0.5, "energy_j": 1.5, "xids": 1, "last_xid": 63,
            "ecc_corrected": 0, "ecc_uncorrected": 0, "remapped_rows": 0, "remapping_pending": True,
            "recovery_action": 1, "pcie_replays": 0, "pcie_transmitted_bytes": 1, "pcie_received_bytes": 1,
            "nvlink_replays": 0, "nvlink_recoveries": 0, "nvlink_errors": 0, "nvlink_transmitted_bytes": 1,
            "nvlink_received_bytes": 1, "others_busy": 0.25, "other_pid": 4711,
        },
        SECOND_GPU: {"temperature_c": 60},
    }  # fmt: skip
    for second in range(10):
        (folder / "hw_counters/packet_seq_err").write_text(f"{8 + second}\n")
        rig.seconds(1, FIRST, SECOND_GPU)
    report = checked(build_report("run", [NodeState(HOST, telemetry=rig.log.run_totals())]))
    (all_told, little), (link,) = report["gpus"], report["links"]

    assert [key for key, value in all_told.items() if value is None] == []
    assert little["power_w"] is None
    assert link["errors"]


def test_report_with_captures_conforms_to_the_schema(run: RunDirectory) -> None:
    """One capture exists, and one was refused."""
    request = capture_files.Request("a", capture_files.BY_USER, 1.0, 0, (0, 1), 5, 3)
    capture_files.submit_request(run.captures, request)
    files = {capture_files.TRACE: 17}
    for rank, outcome in enumerate((
        capture_files.Outcome("a", 0, 5, 3, files=files, left_out={"memory.pickle": "no GPU"}, paused_s=0.5),
        capture_files.Outcome("a", 1, ended="refused"),
    )):  # fmt: skip
        folder = capture_files.rank_folder(run.captures, "a", rank)
        folder.mkdir(parents=True)
        capture_files.write_capture_file(capture_files.outcome_path(folder), outcome)
    report = checked(build_report("run", [], capture_rows(run)))

    assert [row["last_step"] for row in report["captures"]] == [7, None]


def test_report_on_a_hanging_live_run_conforms_to_the_schema(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(10, **WORK)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.state.hang = HangEvidence("dead", 90.0, 10, (), {}, "It hangs", "", ranks=(0,))
    report = checked(build_report(run.run_id, [sidecar.state]))
    rank.close()
    sidecar.close()

    assert (report["run"]["live"], report["verdicts"][0].kind) == (True, "hang")
