"""Values of a report that can be compared with those of another run."""

from __future__ import annotations

import enum
from typing import NamedTuple

from torchlens_perf.analysis.statistics.quantities import format_bytes, format_duration
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.report import Collective, Rank, Report
from torchlens_perf.view.rank_tables import compute_s, mean_parts, parts_by_rank
from torchlens_perf.view.theme import PARTS


class Kind(enum.Enum):
    """Kind of a measure. The values are titles."""

    STEP = "step"
    PART = "part of the step"
    MEMORY = "memory"
    MODULE = "module"
    SECTION = "section"
    COLLECTIVE = "collective"


DETAILS = (Kind.MODULE, Kind.SECTION, Kind.COLLECTIVE)
"""Kinds inside a step. The other kinds describe the step as a whole."""


class Measure(NamedTuple):
    """One value of a run: bytes for memory, otherwise seconds per typical step.

    A module has its forward time by the clock that ranks are judged by, a collective its transfer time per operation.
    """

    kind: Kind
    name: str

    def format(self, value: float) -> str:
        """Return a value with its unit."""
        return format_bytes(value, "B") if self.kind is Kind.MEMORY else format_duration(value)


STEP = Measure(Kind.STEP, "typical step")
CONTENTION = Measure(Kind.PART, PARTS["cpu"].name)
MEAN_STEP = Measure(Kind.STEP, "mean of all steps")
PEAK_MEMORY = Measure(Kind.MEMORY, "peak memory")


def collect_measures(report: Report) -> dict[Measure, float]:
    """Return the values of a run by measure. Values that were not measured are left out."""
    found: dict[Measure, float | None] = {}
    typical = [rank["typical"]["s"] for rank in report["ranks"] if rank["typical"] is not None]
    found[STEP] = sum(typical) / len(typical) if typical else None
    found[MEAN_STEP] = report["steps"]["mean_s"]
    parts = mean_parts(parts_by_rank(report).values())
    found |= {Measure(Kind.PART, PARTS[part].name): parts[part] for part in parts if parts[part]}
    peaks = [rank["memory"]["max_bytes"] for rank in report["ranks"]]
    found[PEAK_MEMORY] = max((peak or 0 for peak in peaks), default=0)
    by_device = report["run"]["judged_by"] == DEVICE
    found |= {
        Measure(Kind.MODULE, each["name"]): (
            each["device_own_s_per_step"] if by_device else each["own_s_per_step"]
        )
        for each in report["modules"]
    }
    found |= {
        Measure(Kind.SECTION, each["name"]): each["s_per_step"] for each in report["sections"]
    }
    found |= {
        Measure(Kind.COLLECTIVE, _collective_name(each)): each["transfer_s"]["p50_s"]
        for each in report["collectives"]
    }
    return {measure: value for measure, value in found.items() if value}


def compute_by_rank(report: Report) -> dict[int, float]:
    """Return each rank's compute time in seconds, as the report's table of ranks shows it by the
    clock of the verdicts."""
    by_device = report["run"]["judged_by"] == DEVICE
    return {
        rank["rank"]: seconds
        for rank in report["ranks"]
        if (seconds := _device_compute_s(rank) if by_device else compute_s(rank))
    }


def _device_compute_s(rank: Rank) -> float | None:
    work = rank["device"] and rank["device"]["work_s"]
    return work and work["p50_s"]


def _collective_name(row: Collective) -> str:
    group = row["description"] or f"group {row['group']}"
    return f"{row['operation']} {row['dtype'] or ''} {group}".replace("  ", " ")


def list_differences(before: Report, after: Report) -> list[str]:
    """Return what differs apart from times, such as "torch 2.12.0 -> 2.13.0" or "ranks 4 -> 8"."""
    facts = [
        ("ranks", before["run"]["world_size"], after["run"]["world_size"]),
        ("nodes", len(before["run"]["nodes"]), len(after["run"]["nodes"])),
        ("device", before["run"]["device"] or "CPU", after["run"]["device"] or "CPU"),
        ("clock", before["run"]["judged_by"], after["run"]["judged_by"]),
        ("program", before["run"]["program"], after["run"]["program"]),
        ("micro-steps", before["steps"]["micro_steps"], after["steps"]["micro_steps"]),
    ]
    one, other = before["run"]["settings"], after["run"]["settings"]
    for name in sorted({*one, *other}) if one and other else ():
        # These may be unknown. Another setting that is missing has its default.
        unset = "not recorded" if name in ("commit", "framework") else "not set"
        facts.append((name, one.get(name, unset), other.get(name, unset)))
    return [f"{name} {one} -> {other}" for name, one, other in facts if one != other]
