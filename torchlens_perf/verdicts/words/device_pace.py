"""Work of devices in a step: who sets its pace, and what is not known about it. Pure.

Events show when a device reaches a mark of the loop. They do not show whether the device was idle
between two marks: one long kernel looks like many short ones with gaps. Three measurements show
more:

- The device ends a pass as soon as its host has issued it (a starved pass). Then a faster device
  would not make the pass shorter: the host sets the pace. How long the device is idle is not known.
- The driver's samples show the share of time in which any kernel was running, of any process. The
  rest is idle time for certain.
- Ranks that wait for others execute their work without gaps. If they do the same work, a device
  that takes longer for it is idle for the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.run.records import PARTS
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.evidence import LargestGap
from torchlens_perf.verdicts.words.report import DeviceTimes, Facts

COMPUTE = ("forward", "backward", "recompute", "optimizer")
# Share of starved passes from which a host sets the pace.
_STARVED = 0.75
# Hosts do not limit devices that are busy for a larger share of the time.
_ALWAYS_BUSY = 0.95
# The smallest share of a step for which idle time limits it.
_MUCH_IDLE = 0.25
# In a loop that replays a graph, the phases take at most this share of a step.
_LITTLE = 0.05
# Other processes are named if they use a GPU for at least this share of the time.
_MUCH_USED = 0.05


class LaunchBoundEvidence(Evidence, frozen=True, tag="launch_bound"):
    """Evidence on devices that wait for their hosts, which therefore set the pace of the steps."""

    kinds = ("host_bound",)
    device: str
    step_s: float
    """Duration of a step by the device's clock."""
    caught_up: float
    """Share of forward and backward passes at whose end the device had no work left, on the rank
    with the largest share."""
    busy: float | None
    """Share of a typical second in which the devices were busy; None if not measured."""
    idle_s: float | None
    """Least time of a step in which a device is idle for lack of kernels, without waits for data and
    other ranks; None if not known."""
    is_hidden: bool
    """True if the time in which other ranks execute the same work shows the idle time."""
    gap: LargestGap | None = None
    """The place between two phases where the host spends much of this time; None without one."""

    def describe(self, verdict: Verdict) -> list[str]:
        busy = describe_busy(self.device, self.busy)
        why = (
            f"the {self.device} had no work left at the end of {format_percent(self.caught_up)} of the"
            " forward and backward passes"
        )
        if self.is_hidden:
            busy = ""
            why = (
                f"in at least {format_percent((self.idle_s or 0.0) / self.step_s)} of a step of"
                f" {format_duration(self.step_s)}, the slowest rank's {self.device} is idle"
            )
        return [
            f"The {self.device} waits for the Python code that issues its work: {why}.",
            busy,
            self.gap.text if self.gap else "",
        ]


def describe_busy(device: str, busy: float | None) -> str:
    if busy is None:
        return f"How long the {device} is idle inside of them was not measured."
    return f"The {device} is busy for {format_percent(busy)} of a typical second."


def timed_devices(report: Facts) -> list[DeviceTimes]:
    """Return the times of the ranks that are judged by their devices."""
    return [each for rank in report["ranks"] if (each := rank["device"]) and each["parts"]]


def mean_parts(timed: Sequence[DeviceTimes]) -> dict[str, float]:
    """Return the mean seconds of each part of a step over the ranks."""
    return {
        part: sum(each["parts"].get(part, 0.0) for each in timed) / len(timed) for part in PARTS
    }


def find_busy_share(report: Facts) -> float | None:
    """Return the share of a typical second in which the job's GPUs were busy; None if not known."""
    busy = [each["typical_busy"] for each in report["gpus"] if each["ranks"]]
    known = [each for each in busy if each is not None]
    return sum(known) / len(known) if known else None


def find_host_pace(report: Facts) -> LaunchBoundEvidence | None:
    """Return the evidence that hosts set the pace; None if they do not, or if that is not known."""
    timed, busy = timed_devices(report), find_busy_share(report)
    if not timed or replays_graphs(report) or (busy or 0.0) > _ALWAYS_BUSY:
        return None
    parts = mean_parts(timed)
    step_s, own = sum(parts.values()), report["steps"]["own_time"]
    starved = max(each["caught_up"] or 0.0 for each in timed)
    found = LaunchBoundEvidence(
        report["run"]["device"] or "", step_s, starved, busy, None, is_hidden=False
    )
    hidden_s = 0.0 if own is None else _compute_s(own["parts"]) - _compute_s(parts)
    if hidden_s >= _MUCH_IDLE * step_s:
        return structs.replace(found, idle_s=hidden_s, is_hidden=True)
    idle_s = None
    if busy is not None:
        idle_s = max(0.0, (1 - busy) * step_s - parts["data"] - parts["communication"])
    if starved < _STARVED or (idle_s is not None and idle_s < _MUCH_IDLE * step_s):
        return None
    return structs.replace(found, idle_s=idle_s)


def replays_graphs(report: Facts) -> bool:
    """Return True if steps replay CUDA graphs, in which phases cannot be timed."""
    timed = timed_devices(report)
    sections = any(row["calls"] >= report["steps"]["alike"] for row in report["device_sections"])
    return bool(timed) and all(
        (each["captured"] or sections) and _compute_s(each["parts"]) < _LITTLE * _step_s(each)
        for each in timed
    )


def lacks_phases(timed: Sequence[DeviceTimes]) -> bool:
    """Return True if hardly any work of the devices was timed in a phase."""
    return all(_compute_s(each["parts"]) < _LITTLE * _step_s(each) for each in timed)


def describe_other_processes(report: Facts) -> str | None:
    """Return a sentence on processes outside the job that use its GPUs.

    Return "" if they use them little, and None if that was not measured.
    """
    known = [each for each in report["gpus"] if each["ranks"] and each["others_busy"] is not None]
    if not known:
        return None
    most = max(known, key=lambda each: each["others_busy"] or 0.0)
    share, pid = most["others_busy"] or 0.0, most["other_pid"]
    if share < _MUCH_USED:
        return ""
    named = "" if pid is None else f" (most recently pid {pid} on {most['host']})"
    return f"Processes outside the job{named} used the GPU for {format_percent(share)} of the time."


def _compute_s(parts: dict[str, float]) -> float:
    return sum(parts.get(part, 0.0) for part in COMPUTE)


def _step_s(device: DeviceTimes) -> float:
    return sum(device["parts"].values())
