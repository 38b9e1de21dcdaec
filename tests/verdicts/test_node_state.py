"""The file of a node's state, which is read back unchanged or refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.report import test_memory_table as memory
from tests.report.test_device_times import HOST as PARTS_MS
from tests.report.test_device_times import Gpu
from tests.sidecar.telemetry.test_infiniband import port
from tests.sidecar.telemetry.test_log import FIRST, Rig
from tests.support.findings import PLACES, episode, findings, hang, slow_links
from tests.support.ranks import HOST
from tests.support.tables import MS
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.errors import RunStoreError
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_facts import DeviceClockQuality
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.run.training_settings import LoaderSettings, TrainingSettings
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.node_state import NodeState, encode_json
from torchlens_perf.verdicts.stragglers.findings import (
    NOTHING,
    Cause,
    Diagnosis,
    StageImbalance,
    UsualTimes,
)
from torchlens_perf.verdicts.words.hang import RankStack

WHY = Diagnosis(
    (Cause("gc", 0.5, {"gc_share": 0.5}, {}),),
    ("GPUs",),
    (),
    {"gc_share": 0.5},
    {},
)


@pytest.fixture
def state(run: RunDirectory, tmp_path: Path) -> NodeState:
    """Return a state with a value in every field.

    Most values come from rounds of a sidecar over two ranks.
    """
    ranks = [Gpu(run, rank, identity={"attributes": {"slurm.job.id": "7"}}) for rank in range(2)]
    for rank in ranks:
        session, recorder = rank.session, rank.session.recorder
        session.metadata.add_group("0", range(2), "default_pg")
        device: DeviceClockQuality = {
            "clock": "CUDA events",
            "error_ns": 4000,
            "captured": 1,
            "skipped": 0,
            "unread": 0,
        }
        session.facts.device = device
        session.facts.training = TrainingSettings(LoaderSettings(2, pin_memory=False))
        session.facts.gpus = [{"uuid": FIRST, "name": "H200", "index": 0}]
        session.facts.recording = {"mark_ns": 90.5, "module_period": 2}
        session.publish()
        for number in range(40):
            recorder.begin(Kind.MODULE, session.intern("block"))
            recorder.end(Kind.MODULE, session.intern("block"))
            for kind, label in ((Kind.MODULE_BACKWARD, "block"), (Kind.SECTION, "log")):
                recorder.record_span(kind, session.intern(label), 0, 5)
            collective = session.intern("allreduce group=0 dtype=float32")
            done = int(Flag.COMPLETED)
            recorder.record_completed(
                int(Kind.COLLECTIVE), collective, number, number * MS, 90, done, 64, number
            )
            forward, elsewhere = session.intern("forward"), int(Flag.OTHER_THREAD)
            recorder.record_completed(
                int(Kind.FORWARD), forward, number, number * MS, MS, elsewhere
            )
            memory.mark_memory(
                rank, allocated=(number << 20, 0), limit=1 << 40, alloc_retries=number
            )
            rank.timed_steps(1, 30 * MS)
        rank.stamped("decode", [MS] * 500)
        rank.timed_steps(1, 30 * MS)
        recorder.record_completed(int(Kind.MERGED), session.intern("decode"), 41, MS, MS, 0, 2, 1)
        rank.steps(1, **PARTS_MS)
        recorder.next_step(int(Flag.WITHOUT_MODULES))
        memory.ran_out(run, rank)
        rank.close()
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.close()
    rig = Rig(run, tmp_path / "infiniband")
    port(tmp_path / "infiniband")
    rig.gpus.values, rig.gpus.losses[FIRST] = (
        {FIRST: {"temperature_c": 88, "power_w": 1.5, "xids": 1}},
        1,
    )
    rig.seconds(12, FIRST)
    slow = findings(
        episode(3), episode(5, until=180, cost_ns=1 / 3), usual=(UsualTimes("a", "0-7", 5e6, 1e6),)
    )
    found = dataclasses.replace(
        add_straggler_groups(slow, PLACES, diagnosed=lambda group: WHY),
        imbalance=StageImbalance("pp 1", (0, 1), 2e6, 1e6, 2), diagnoses=((episode(5).key, WHY),),
    )  # fmt: skip
    log = FindingLog("run")
    log.record_changes(0, slow, None, PLACES, 0, verdicts=[slow_links((0, 1))])
    return dataclasses.replace(
        sidecar.state, dropped_segments=2, unwritten_records=3, notes=["one"], passing_notes=["two"], findings=found,
        hang=structs.replace(hang(), stacks={2: RankStack(("train.py:3",), "")}),
        records=dataclasses.replace(log.records, hung_s={0: {57: 12.5}}),
        telemetry=rig.log.run_totals(), sidecar_cpu_s=1.25, commit="3fa9c1d25d41",
    )  # fmt: skip


def empty(value: dict[str, Any]) -> set[str]:
    return {key for key, each in value.items() if each in (None, "", 0, [], {})}


def test_saved_state_is_read_back_unchanged(run: RunDirectory, state: NodeState) -> None:
    """A state that is read and saved again gives the same file and the same report."""
    state.save(run)
    written = run.node_state_path(HOST).read_bytes()
    loaded = node_state.load(run.node_state_path(HOST))
    loaded.save(run)

    assert run.node_state_path(HOST).read_bytes() == written
    assert build_report("run", [loaded]) == build_report("run", [state])
    value = msgspec.json.decode(written)
    process = next(iter(value["processes"].values()))
    statistics = process["statistics"]
    assert (empty(value), empty(value["telemetry"])) == (
        {"saved_unix_ns", "traced"},
        {"lost_samples", "dropped_files", "slow_samples"},
    )
    assert {"facts", "out_of_memory", "cpu_wait"}.isdisjoint(empty(process))
    assert {"groups", "gpus", "device", "recording", "training"}.isdisjoint(empty(process["facts"]))
    assert empty(statistics) <= {
        "lost",
        "flags_seen",
        "first_step",
        "memory_bytes",
        "memory_max_bytes",
        "work",
    }
    assert empty(statistics["device"]) <= {
        "caught_up",
        "fed_modules",
        "stamped_lost",
        "stray_records",
        "sections",
        "modules",
    }
    assert empty(value["join"]) == {"generation", "outdated_records", "from_any"}


def test_values_of_the_state_are_read_back_with_their_types(
    run: RunDirectory, state: NodeState
) -> None:
    """The values are sketches, arrays, and mutable and immutable collections."""
    state.save(run)
    loaded = node_state.load(run.node_state_path(HOST))
    (process, *_), (before, *_) = loaded.processes.values(), state.processes.values()

    assert isinstance(loaded.join, CollectiveJoin)
    assert (loaded.findings, loaded.hang) == (state.findings, state.hang)
    assert (loaded.records, loaded.telemetry) == (state.records, state.telemetry)
    assert (process.identity, process.anchor) == (before.identity, before.anchor)
    assert process.facts == before.facts
    process.statistics.step.merge(before.statistics.step)
    for key, each in process.statistics.mix.bins.items():
        each.merge(before.statistics.mix.bins[key])
    assert process.statistics.step.count == 2 * before.statistics.step.count
    assert loaded.findings.diagnosis(episode(5).key) == WHY


@pytest.mark.parametrize("schema", [b"13", b"99"])
def test_state_file_of_another_schema_is_refused(run: RunDirectory, schema: bytes) -> None:
    run.node_state_path(HOST).write_bytes(b'{"host":3,"schema":' + schema + b"}")
    with pytest.raises(
        RunStoreError, match=f"has schema {schema.decode()}, this version reads {node_state.SCHEMA}"
    ):
        node_state.load(run.node_state_path(HOST))


def test_damaged_state_file_is_refused(run: RunDirectory, state: NodeState) -> None:
    """The file ends early, lacks a field, or has a value of another type."""
    state.save(run)
    path = run.node_state_path(HOST)
    text = path.read_bytes()
    sketch = b'"duration":['
    damaged = [
        text[: len(text) // 2],
        text.replace(b'"host":"', b'"host":["', 1),
        text.replace(b'"statistics":', b'"statistic":', 1),
        text.replace(sketch, sketch + b'"', 1),
        text.replace(sketch, b'"duration":[1],"other":[', 1),
        text.replace(b'"parts_ns":[[', b'"parts_ns":[["x",', 1),
        text.replace(b'"parts_ns":[[', b'"parts_ns":[[[],', 1),
        text.replace(b'"ranges":"0-1"', b'"ranges":"0-x"'),
    ]
    for each in damaged:
        assert each != text
        path.write_bytes(each)
        with pytest.raises(RunStoreError, match="cannot be read"):
            node_state.load(path)


def test_values_that_are_not_finite_become_null_in_the_state_file(run: RunDirectory) -> None:
    """Null is refused when read, unless the field may be None."""
    for detectable_ns, cpu_s in ((None, 1.0), (3.0, 1.0), (3.0, math.nan), (3.0, math.inf)):
        state = NodeState(
            HOST,
            findings=dataclasses.replace(NOTHING, detectable_ns=detectable_ns),
            sidecar_cpu_s=cpu_s,
        )
        assert (b"null" in encode_json(state.sidecar_cpu_s)) is not math.isfinite(cpu_s)
        state.save(run)
        if math.isfinite(cpu_s):
            assert node_state.load(run.node_state_path(HOST)).findings == state.findings
        else:
            with pytest.raises(RunStoreError, match="sidecar_cpu_s"):
                node_state.load(run.node_state_path(HOST))
