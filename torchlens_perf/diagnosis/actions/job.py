"""A rule for an action, and the facts of the job that rules look at. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from torchlens_perf.analysis.statistics.quantities import (
    format_duration,
    format_percent,
)
from torchlens_perf.diagnosis.what_if import Replay
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.training_settings import TrainingSettings
from torchlens_perf.verdicts.words.device_pace import LaunchBoundEvidence, find_host_pace
from torchlens_perf.verdicts.words.report import LostTime, Report

# The share of a step that ranks wait for CPUs, from which no CPU is spare.
_MUCH_CONTENTION = 0.25
_MIN_TOLD = 0.02
"""A smaller share of a step is not told in a clause."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Proposal of a rule. Without a change and a gain, the rule's condition must be enough."""

    because: str
    """A sentence with the figures of the run that justify the action."""
    action: str
    """What to do, in the imperative."""
    change: str | None = None
    """The change whose gain is predicted, in the form of `torchlens-perf what-if`."""
    gain_s: float | None = None
    """The measured cost per step, if no change of what-if describes the action."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of the table. `find` returns None if the action does not apply, or if a fact that it
    needs is not known."""

    key: str
    link: str
    """Documentation of PyTorch or NVIDIA."""
    find: Callable[[Job], Proposal | None]

    @property
    def condition(self) -> str:
        """When the rule applies, as a sentence."""
        return " ".join((self.find.__doc__ or "").split())


def rule(key: str, link: str) -> Callable[[Callable[[Job], Proposal | None]], Rule]:
    """Make a rule of a function, whose docstring is the condition."""
    return lambda find: Rule(key, link, find)


@dataclasses.dataclass(frozen=True)
class Job:
    """The facts that rules look at."""

    report: Report
    settings: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)
    """Settings of the lowest rank."""
    replay: Replay | None = None
    """None if the recorded steps cannot be replayed."""
    ranks_per_cpus: int = 1
    """Largest number of ranks of a host that may use the same CPUs."""
    length_correlation: float | None = None
    """Correlation of the ranks' times with the sizes of their batches, within steps; None if all
    batches have one size, or if sizes are not known."""

    @property
    def lost(self) -> LostTime:
        """The critical path. Rules only run if it is known."""
        lost = self.report["lost_time"]
        assert lost is not None
        return lost

    def seconds(self, *names: str) -> float:
        """Return the time of these classes of the critical path per step."""
        return sum(each.s_per_step for each in self.lost.classes if each.name in names)

    def share(self, *names: str) -> float:
        """Return the share of these classes in a step."""
        return sum(each.share for each in self.lost.classes if each.name in names)

    def describe(self, what: str, *names: str) -> str:
        """Return a clause such as "data loading takes 12 ms (23%) of a step".

        A predicted gain also has the waits for a CPU, which are a class of their own.
        """
        waits = self.share("cpu") >= _MIN_TOLD and not set(OWN_PARTS).isdisjoint(names)
        return self.describe_seconds(what, self.seconds(*names), self.share(*names)) + (
            " without its waits for a CPU" if waits else ""
        )

    def describe_seconds(self, what: str, seconds: float, share: float | None = None) -> str:
        """Like describe(), for a time per step that is no class."""
        return (
            f"{what} {format_duration(seconds)}"
            f" ({format_percent(seconds / self.lost.step_s if share is None else share)}) of a step"
        )

    @property
    def is_cuda(self) -> bool:
        return self.report["run"]["device"] == "GPU"

    @property
    def ranks_per_host(self) -> int:
        return max(Counter(rank["host"] for rank in self.report["ranks"]).values(), default=1)

    @property
    def threads(self) -> int | None:
        """Largest number of threads that one operation of torch uses."""
        known = [rank["cpu"]["threads"] for rank in self.report["ranks"] if rank["cpu"]]
        return max((each for each in known if each), default=None)

    @property
    def cpus_per_rank(self) -> int | None:
        """CPUs of a rank, or its part of CPUs that ranks share; None if not known."""
        known = [rank["cpu"]["cpus"] for rank in self.report["ranks"] if rank["cpu"]]
        found = [each for each in (*known, self.settings.cpu_count) if each]
        return min(found) // self.ranks_per_cpus if self.settings.cpu_count else None

    @property
    def spare_cpus(self) -> int:
        """CPUs per rank that neither torch's threads nor workers of the loader need.

        0 if that is not known, and if ranks wait for CPUs: other programs need these CPUs.
        """
        cpus, threads, loader = self.cpus_per_rank, self.threads, self.settings.loader
        if cpus is None or threads is None or self.share("cpu") >= _MUCH_CONTENTION:
            return 0
        return max(0, cpus - threads - (loader.workers if loader else 0))

    @property
    def used_memory(self) -> float | None:
        """Largest share of its device's memory that a rank has used; None if not known."""
        shares = []
        for rank in self.report["ranks"]:
            device = rank["memory"]["device"]
            if device is None or not device["limit_bytes"] or not device["peak_reserved_bytes"]:
                return None
            shares.append(device["peak_reserved_bytes"] / device["limit_bytes"])
        return max(shares, default=None)

    @property
    def host_pace(self) -> LaunchBoundEvidence | None:
        """Evidence that a GPU waits for its kernels; None if it does not, or if not known."""
        return find_host_pace(self.report) if self.is_cuda else None

    @property
    def caught_up(self) -> float | None:
        """Share of passes at whose end the device had no work left; None if not known."""
        devices = filter(None, (rank["device"] for rank in self.report["ranks"]))
        shares = [each["caught_up"] for each in devices if each["caught_up"] is not None]
        return sum(shares) / len(shares) if shares else None
