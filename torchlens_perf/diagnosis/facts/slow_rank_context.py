"""Facts that sentences on slow ranks need."""

from __future__ import annotations

from collections.abc import Sequence

from torchlens_perf.diagnosis.facts.collective_rows import collective_rows
from torchlens_perf.diagnosis.facts.module_rows import module_rows
from torchlens_perf.verdicts.latest_attempt import latest_collective_joins, latest_processes
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.judged_steps import UNDECIDED
from torchlens_perf.verdicts.words.stragglers import SlowRankContext, compute_last_arrival_shares


def build_slow_rank_context(nodes: Sequence[NodeState]) -> SlowRankContext:
    """Return the facts for alerts on slow ranks, without other facts of the run."""
    processes = latest_processes(nodes)
    last = compute_last_arrival_shares(collective_rows(latest_collective_joins(nodes)))
    return SlowRankContext(
        module_rows(processes), device_kind(processes), judging_clocks(processes), last
    )


def device_kind(processes: dict[int, ProcessState]) -> str | None:
    """Return the kind of device that ranks compute on: "GPU" or torch's name; None for the CPU."""
    kinds = {process.facts.compute_device for process in processes.values()} - {"", "cpu"}
    if not kinds and any(process.statistics.device.timed_steps for process in processes.values()):
        # No model was found, but kernels were timed.
        kinds.add("cuda")
    kind = min(kinds, default=None)
    return "GPU" if kind == "cuda" else kind


def judging_clocks(processes: dict[int, ProcessState]) -> str | None:
    """Return the clocks by which the ranks are judged, such as "host"; None if not decided."""
    clocks = {process.judged_by for process in processes.values()} - {UNDECIDED}
    return " and ".join(sorted(clocks, reverse=True)) or None
