"""The kinds of verdicts: what all screens, commands and exporters know about each. Pure."""

from __future__ import annotations

import dataclasses

from torchlens_perf.run.verdicts import ENDED, STARTED, UPDATED

BAD, WARNING, GOOD, NEUTRAL = "bad", "warning", "good", "neutral"
"""Severities of verdicts."""


@dataclasses.dataclass(frozen=True)
class VerdictKind:
    """One kind of verdicts."""

    name: str
    """The name in JSON. Verdicts that are no longer true have names of their own."""
    status: str
    """The status word on screens."""
    severity: str
    fail_on: str = ""
    """The name for `report --fail-on`; "" if it is no reason to fail."""
    limit: str = ""
    """What limits the step instead of computing, on screens; "" for kinds of other verdicts."""
    stops_job: bool = False
    is_summary: bool = False
    """True for verdicts on the whole run, which have no first step."""
    singles_out: bool = False
    """True if the ranks of the verdict are shown before other ranks."""
    is_captured: bool = False
    """True if a profile of some steps shows more."""
    changes: tuple[str, ...] = ()
    """The changes of findings of this kind that raise alerts."""
    is_past: bool = False
    """True for verdicts that are no longer true."""


_ALL = STARTED, UPDATED, ENDED
_CURRENT = (
    VerdictKind("straggler", "SLOW RANK", BAD, "slow-rank", changes=_ALL, singles_out=True, is_captured=True),
    VerdictKind("slow_link", "SLOW LINK", BAD, "slow-link", changes=_ALL),
    VerdictKind("imbalance", "IMBALANCE", WARNING, "imbalance", changes=(STARTED, ENDED)),
    VerdictKind("growing_steps", "GROWING STEPS", WARNING, "growing-steps"),
    VerdictKind("hang", "HANG", BAD, "hang", changes=_ALL, stops_job=True, singles_out=True),
    VerdictKind("died", "CRASH", BAD, "crash", stops_job=True),
    VerdictKind("failed", "FAILED", BAD, "crash", stops_job=True),
    VerdictKind("out_of_memory", "OUT OF MEMORY", BAD, "out-of-memory", stops_job=True, singles_out=True),
    VerdictKind("data_bound", "BOTTLENECK", WARNING, "data-bound", "data loading", is_captured=True),
    VerdictKind("communication_bound", "BOTTLENECK", WARNING, "communication-bound", "comm wait", is_captured=True),
    VerdictKind("host_bound", "BOTTLENECK", WARNING, "host-bound", "host code", is_captured=True),
    VerdictKind("lack_of_cpu", "BOTTLENECK", WARNING, "cpu-contention", "CPU contention", is_captured=True),
    VerdictKind("compute_bound", "OK", GOOD, is_summary=True, is_captured=True),
    VerdictKind("slow_iteration", "SLOW ITERATION", WARNING, "slow-iteration"),
    VerdictKind("long_steps", "LONG STEPS", WARNING, is_captured=True),
    VerdictKind("uneven_steps", "UNEVEN STEPS", WARNING),
    VerdictKind("startup", "SLOW START", WARNING),
    VerdictKind("none", "OK", GOOD, is_summary=True),
    VerdictKind("not_compared", "NOT COMPARED", NEUTRAL, is_summary=True),
    VerdictKind("not_known", "NOT MEASURED", NEUTRAL),
    VerdictKind("no_steps", "NO STEPS", NEUTRAL),
)  # fmt: skip
OTHER = VerdictKind("", "OTHER", WARNING)
"""The kind of a verdict from another version, which a state file may contain."""
SHORT_STRAGGLER = "straggler_transient"
"""The kind of the verdict on a rank that was slow for a few steps."""


def past_kind(kind: str) -> str:
    """Return the kind of verdicts of this kind that are no longer true."""
    return f"{kind}_ended"


KINDS = {each.name: each for each in _CURRENT}
KINDS |= {
    past_kind(each.name): dataclasses.replace(each, is_past=True, stops_job=False)
    for each in _CURRENT
}
KINDS[SHORT_STRAGGLER] = KINDS[past_kind("straggler")]
"""All kinds by their names in JSON."""
NOT_COMPUTING_KINDS = tuple(each.name for each in _CURRENT if each.limit)
"""Kinds of verdicts that something other than computing limits the step."""
