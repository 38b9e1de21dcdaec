"""What one node's sidecar knows, as a file: the report is made from these files, live or later."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from torchlens_perf.clock import Anchor
from torchlens_perf.collective_join import CollectiveJoin
from torchlens_perf.culprits import NOBODY, Named
from torchlens_perf.errors import RunStoreError
from torchlens_perf.identity import Identity
from torchlens_perf.rank_statistics import RankStatistics
from torchlens_perf.run_directory import RunDirectory
from torchlens_perf.straggler import NOTHING, Findings

SCHEMA = 6


@dataclasses.dataclass
class ProcessState:
    """One process of one rank."""

    identity: Identity
    anchor: Anchor
    statistics: RankStatistics
    counted: int = -1
    """Sequence number of the last record that the statistics hold."""
    ended: str = ""
    """"closed" by its watch, "died", or "" while it runs."""
    trace_every: int = 0
    gpus: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Those that it computes on: uuid, name and torch's index."""
    native: bool = True
    model: str = ""
    """What it computes, see identity.model_digest."""
    memory_source: str = ""
    compute_device: str = ""
    """What its models are on: "cpu", "cuda", ...; "" where that is not known."""
    deeper_modules: bool = False
    """Whether its models have modules below those that are timed."""
    device: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the device's times: which clock, how far off, and how many are missing for what reason; empty without any."""
    notes: list[str] = dataclasses.field(default_factory=list)
    unbalanced: int = 0
    too_deep: int = 0
    names_lost: int = 0
    internal_errors: int = 0
    tool_ns: int = 0
    open_spans: list[str] = dataclasses.field(default_factory=list)
    """What a process that died was inside of."""
    groups: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Process groups that it has used: members and description."""
    not_measured: list[str] = dataclasses.field(default_factory=list)
    """Parts of the step that are there, or may be, and that nothing tells from the others."""
    cpu_wait: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    """Of the sidecar's samples: the sum of the shares of time in which its main thread was ready and had no CPU, and
    how many samples there are."""
    missing_tap: str = ""
    """The file of the native tap on collectives that it has not found; "" if it had it, or had no other ranks."""
    out_of_memory: dict[str, Any] | None = None
    """The newest table that it wrote when its device's memory ran out, see hooks/out_of_memory.py."""

    def to_json(self) -> dict[str, Any]:
        value = {field: getattr(self, field) for field in _PLAIN_FIELDS}
        value["gpus"] = self.gpus
        value["identity"] = self.identity.to_json()
        value["anchor"] = list(self.anchor)
        value["statistics"] = self.statistics.to_json()
        value["out_of_memory"] = self.out_of_memory
        value["missing_tap"] = self.missing_tap
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProcessState:
        return cls(
            identity=Identity(**value["identity"]),
            anchor=Anchor(*value["anchor"]),
            statistics=RankStatistics.from_json(value["statistics"]),
            out_of_memory=value.get("out_of_memory"),
            gpus=value.get("gpus", []),
            missing_tap=value.get("missing_tap", ""),
            **{field: value[field] for field in _PLAIN_FIELDS},
        )


_PLAIN_FIELDS = (
    "counted", "ended", "trace_every", "native", "model", "memory_source", "device", "notes", "unbalanced", "too_deep",
    "names_lost", "internal_errors", "tool_ns", "open_spans", "groups", "not_measured", "cpu_wait",
    "compute_device", "deeper_modules",
)  # fmt: skip


@dataclasses.dataclass
class NodeState:
    """One node of the run."""

    host: str
    processes: dict[str, ProcessState] = dataclasses.field(default_factory=dict)
    dropped_segments: int = 0
    unwritten_records: int = 0
    """Let go while the run directory could not be written: the statistics hold them, no segment does."""
    notes: list[str] = dataclasses.field(default_factory=list)
    passing_notes: list[str] = dataclasses.field(default_factory=list)
    """What holds now, as that another node is not reached; a later sidecar says what holds then."""
    sidecar_cpu_s: float = 0.0
    join: CollectiveJoin = dataclasses.field(default_factory=CollectiveJoin)
    """The node's collectives, joined across its ranks."""
    hang: dict[str, Any] | None = None
    """The hang in progress, see JobView.hang."""
    named: Named = NOBODY
    """Whom its findings name."""
    findings: Findings = NOTHING
    """What this node's sidecar has judged: its own ranks, or on node 0 those of all nodes."""
    alerts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Those that are open, see AlertLog.to_json()."""
    telemetry: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the hardware did, see TelemetryLog.to_json()."""
    tap_outlook: str = ""
    """What becomes of the native tap that its ranks have missed, see TapForNextRun.outlook()."""

    def save(self, run: RunDirectory) -> None:
        """Replaces the node's file. Raises OSError on a full disk."""
        value = {
            "schema": SCHEMA,
            "host": self.host,
            "processes": {key: process.to_json() for key, process in self.processes.items()},
            "dropped_segments": self.dropped_segments,
            "unwritten_records": self.unwritten_records,
            "notes": self.notes,
            "passing_notes": self.passing_notes,
            "sidecar_cpu_s": self.sidecar_cpu_s,
            "join": self.join.to_json(),
            "hang": self.hang,
            "named": self.named.to_json(),
            "findings": self.findings.to_json(),
            "alerts": self.alerts,
            "telemetry": self.telemetry,
            "tap_outlook": self.tap_outlook,
        }
        path = run.node_state(self.host)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(value, separators=(",", ":")))
        os.replace(partial, path)


def load(path: Path) -> NodeState:
    """The state that save() wrote. Raises RunStoreError if it cannot be read."""
    try:
        value = json.loads(path.read_text())
        if value["schema"] != SCHEMA:
            raise RunStoreError(f"{path} has schema {value['schema']}, this version reads {SCHEMA}")
        return NodeState(
            host=value["host"],
            processes={key: ProcessState.from_json(process) for key, process in value["processes"].items()},
            dropped_segments=value["dropped_segments"],
            unwritten_records=value["unwritten_records"],
            notes=value["notes"],
            passing_notes=value["passing_notes"],
            sidecar_cpu_s=value["sidecar_cpu_s"],
            join=CollectiveJoin.from_json(value["join"]),
            hang=value["hang"],
            named=Named.from_json(value["named"]),
            findings=Findings.from_json(value["findings"]),
            alerts=value.get("alerts", {}),
            telemetry=value.get("telemetry", {}),
            tap_outlook=value.get("tap_outlook", ""),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunStoreError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def load_all(run: RunDirectory) -> list[NodeState]:
    """All nodes of the run, by host. Raises RunStoreError if there are none."""
    paths = sorted(run.nodes.glob("*.json"))
    if not paths:
        raise RunStoreError(f"{run.path} is not a run directory, or its sidecar has not written anything yet")
    return [load(path) for path in paths]
