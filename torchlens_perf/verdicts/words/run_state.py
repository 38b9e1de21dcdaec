"""The state of a run in words: how many ranks were seen, and whether they run, have ended or have
died.

All screens use these words: the report's title, the page, the notebook, `top` and the list of runs.
"""

from __future__ import annotations

import datetime
import signal
import time
from collections.abc import Mapping, Sequence

from torchlens_perf.analysis.statistics.quantities import format_bytes
from torchlens_perf.run.failure import Failure, ProcessEnd
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.verdicts.long_steps import LongSteps
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.oom import was_ended_by_oom
from torchlens_perf.verdicts.words.report import Rank, Run

RUNNING, ENDED, DIED, FAILED = "running", "ended", "died", "failed"
_MIN_UNEVEN_SHARE = 0.01
_FREE_MEMORY = (
    "free memory on {}: a smaller batch, fewer workers of the DataLoader, or checkpointing."
)
SILENT_S = 60.0
"""A live run is called silent after this time without new data. Sidecars write every few seconds.
"""


class UnevenStepsEvidence(Evidence, frozen=True, tag="uneven_steps"):
    """Evidence on the ranks that ended normally after the fewest steps."""

    fewest: int
    most: int
    longest: tuple[int, ...]
    """The ranks with the most steps."""

    def describe(self, verdict: Verdict) -> list[str]:
        ended = format_rank_list(self.ranks)
        return [
            f"{ended.capitalize()} ended normally after {self.fewest} steps, but"
            f" {format_rank_list(self.longest)} made {self.most}: from step {self.fewest} on, other"
            f" ranks trained without {ended}."
        ]


class DiedEvidence(Evidence, frozen=True, tag="died"):
    """Evidence on ranks whose processes ended before watch() was closed."""

    last_step: int | None
    """The last finished step of the rank that died first; None if it finished no step."""
    inside: tuple[str, ...]
    """The open spans of this rank when it died."""
    host: str
    """The host of this rank."""
    end: ProcessEnd | None
    """How the process of this rank ended; None if that is not known."""
    by_oom_killer: bool
    """True if the kernel's OOM killer ended this process."""
    used_bytes: int | None = None
    """The most resident memory of this rank at the end of a step; None if not known."""

    def describe(self, verdict: Verdict) -> list[str]:
        step = self.last_step
        place = "before its first step ended" if step is None else f"after step {step}"
        if self.inside:
            place = f"{place}, in {' > '.join(self.inside)}"
        how = name_end(self.end) or "a signal, a crash or os._exit()"
        ended, kills = f"the process ended with {how}", self.end
        if self.by_oom_killer:
            used = self.used_bytes and f"; the rank used up to {format_bytes(self.used_bytes, 'B')}"
            limit = f"{_describe_memory_limit(self.end)}{used or ''}"
            ended, kills = f"killed by the kernel: out of memory ({limit})", None
        others = [rank for rank in self.ranks if rank != verdict.rank]
        too = f"{format_rank_list(others).capitalize()} died, too." if others else ""
        died = f"Rank {verdict.rank} ({self.host}) died {place}: {ended}."
        return [died, _describe_oom_kills(kills), too]


class FailedEvidence(Evidence, frozen=True, tag="failed"):
    """Evidence on the rank that failed first, and on ranks that ended afterwards."""

    failure: Failure
    failed_too: tuple[int, ...]
    """Other ranks that an exception of their own has ended."""
    lost_peers: tuple[int, ...]
    """Ranks that ended because their connection to another rank was lost."""
    closed: tuple[int, ...]
    """Ranks that ended without an exception, although other ranks lost their connection."""
    closed_by: tuple[str, ...]
    """How these ranks ended, such as "exit code 3" or "SIGSEGV"; () if not known."""
    died: tuple[int, ...]
    """Ranks whose processes ended without an exception before watch() was closed."""
    host: str
    """The host of the rank that failed first."""
    end: ProcessEnd | None
    """How the process of this rank ended; None if that is not known."""
    seen: int
    """Number of ranks with data."""
    world_size: int

    @property
    def failed_at(self) -> tuple[int, int]:
        return self.failure["step"], self.failure["unix_ns"]

    @property
    def may_be_unseen(self) -> bool:
        """True if a rank without data may have failed before all others."""
        return self.failure["lost_peer"] and not self.closed and self.seen < self.world_size

    def describe(self, verdict: Verdict) -> list[str]:
        failure, before = self.failure, ""
        place = " of ".join(part for part in (failure["phase"], failure["module"]) if part)
        if self.may_be_unseen:
            seen = f"only {self.seen} of {self.world_size} ranks were seen"
            before = f"Another rank ended before, or the network failed: {seen}."
        return [
            f"Rank {verdict.rank} ({self.host}) failed {describe_failure_time(failure)}"
            f"{f', in {place}' if place else ''}: {describe_exception(failure)}.",
            _describe_oom_kills(self.end),
            before,
            self._describe_ranks_ended_after(),
        ]

    def _describe_ranks_ended_after(self) -> str:
        """Return a sentence on the ranks that ended because of the failure; "" without any."""
        if self.closed:
            how = f" ({', '.join(self.closed_by)})" if self.closed_by else ""
            return f"Before, {format_rank_list(self.closed)} ended without an exception{how}."
        ends = [
            f"{format_rank_list(ranks)} {how}"
            for ranks, how in (
                (self.failed_too, "by another exception"),
                (self.lost_peers, "by a lost connection"),
                (self.died, "by a signal or an exit"),
            )
            if ranks
        ]
        return f"Then the job ended: {', '.join(ends)}." if ends else ""


def run_state(live: bool, died: object, failed: object) -> str:
    """Return RUNNING for a live run, FAILED if a rank failed, DIED if one died, else ENDED."""
    return RUNNING if live else FAILED if failed else DIED if died else ENDED


def describe_ranks(run: Run) -> str:
    """Return a phrase with the number of ranks, and with the number of seen ranks if smaller."""
    nodes = f" on {len(run['nodes'])} nodes" if len(run["nodes"]) > 1 else ""
    size, seen = run["world_size"], run["ranks_seen"]
    if seen < size:
        return f"only {seen} of {size} ranks seen{nodes}"
    return f"{size} rank{'s' if size != 1 else ''}{nodes}"


def describe_run_state(run: Run, now_unix_s: float | None = None) -> str:
    """Return the state of the run in a report in words.

    now_unix_s: the present time. The default is the time of this machine's clock.
    """
    return join_state(*describe_state(run, now_unix_s))


def join_state(state: str, ranks: str) -> str:
    """Return the result of describe_state() as one phrase."""
    return f"{state}, {ranks}" if ranks else state


def describe_state(run: Run, now_unix_s: float | None = None) -> tuple[str, str]:
    """Return the state of a run, and which ranks failed or died if that is not all of it.

    now_unix_s: the time by which a live run is silent; see describe_run_state().
    """
    live, died, failed, seen = run["live"], run["died"], run["failed"], run["ranks_seen"]
    if failed and not live:
        return "failed", ""
    state, silent_s = "ended", _silent_s(run, now_unix_s)
    if live:
        state = f"silent for {format_age(silent_s)}" if silent_s > SILENT_S else "running"
    if failed:
        return state, f"{format_rank_list(failed)} failed"
    if not live and died and len(died) == seen:
        return "died" if seen == 1 else "all ranks died", ""
    return state, f"{format_rank_list(died)} died" if died else ""


def _silent_s(run: Run, now_unix_s: float | None) -> float:
    try:
        written_s = datetime.datetime.fromisoformat(run["as_of"] or "").timestamp()
    except ValueError:
        # The time may be missing, or another program may have written the report.
        return 0.0
    return (time.time() if now_unix_s is None else now_unix_s) - written_s


def format_age(seconds: float) -> str:
    """Return a duration as whole days, hours, minutes or seconds, in words."""
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{int(seconds)} seconds"


def build_crash_verdicts(ranks: Sequence[Rank], world_size: int) -> list[Verdict]:
    """Return a verdict on the rank that failed or died first; else []."""
    failed = [rank for rank in ranks if rank["failure"] is not None]
    if not failed:
        return _build_died_verdicts(ranks)
    died = tuple(rank["rank"] for rank in ranks if rank["state"] == DIED)
    # A rank that has lost its connection to another rank has not failed first.
    own = [rank for rank in failed if not _failure_of(rank)["lost_peer"]]
    if died and not own:
        return _build_died_verdicts(ranks)
    first = min(own or failed, key=lambda rank: _failure_of(rank)["unix_ns"])
    if was_ended_by_oom(first):
        return []
    closed = [] if own else [rank for rank in ranks if rank["state"] == "closed"]
    failure = _failure_of(first)
    evidence = FailedEvidence(
        failure,
        tuple(rank["rank"] for rank in own if rank is not first),
        tuple(rank["rank"] for rank in failed if rank not in own and rank is not first),
        tuple(rank["rank"] for rank in closed),
        tuple(dict.fromkeys(filter(None, (name_end(rank["end"]) for rank in closed)))),
        died,
        first["host"],
        first["end"],
        len(ranks),
        world_size,
    )
    return [
        Verdict(
            kind="failed",
            rank=first["rank"],
            phase=failure["phase"] or None,
            since_step=failure["step"],
            confidence=1.0,
            action=_choose_action(first["rank"], evidence),
            evidence=evidence,
        )
    ]


def build_uneven_steps_verdicts(steps: Mapping[int, int]) -> list[Verdict]:
    """Return a verdict if ranks that should make equally many steps did not; else [].

    steps: number of steps by rank. A difference of one step may only be the step in progress at the
    end of the recording.
    """
    fewest, most = min(steps.values(), default=0), max(steps.values(), default=0)
    if most - fewest <= max(1, _MIN_UNEVEN_SHARE * most):
        return []
    ended = tuple(rank for rank, count in sorted(steps.items()) if count == fewest)
    longest = tuple(rank for rank, count in sorted(steps.items()) if count == most)
    return [
        Verdict(
            kind="uneven_steps",
            rank=ended[0],
            since_step=fewest,
            confidence=0.9,
            action=(
                "give all ranks the same number of batches: drop_last=True, or a DistributedSampler."
            ),
            evidence=UnevenStepsEvidence(fewest, most, longest, ranks=ended),
        )
    ]


def is_explained_by_uneven_steps(
    verdict: Verdict, fewest: int, before: Sequence[LongSteps]
) -> bool:
    """Return True for long steps without a known reason that only ranks made that went on.

    They wait for ranks that have ended, as with Join. fewest: number of steps of the ranks that
    ended first. before: classes of long steps of these ranks.
    """
    long = verdict.evidence.long
    if long is None:
        return False
    # A class with many steps lists only the newest ones.
    is_late = not long["kinds"] and min(long["steps"]) >= fewest
    return is_late and not any(
        each["part"] == long["part"] and not each["kinds"] and 2 * each["share"] >= long["share"]
        for each in before
    )


def _failure_of(rank: Rank) -> Failure:
    assert rank["failure"] is not None
    return rank["failure"]


def describe_failure_time(failure: Failure) -> str:
    """Return "in step 15", or that the watch had ended before."""
    steps = failure["step"]
    return (
        f"after watch() had ended with {steps} steps"
        if failure["after_watch"]
        else f"in step {steps}"
    )


def describe_exception(failure: Failure) -> str:
    """Return "ValueError: bad batch (train.py:42 in main)"."""
    error = ": ".join(filter(None, (failure["type"], failure["message"].rstrip("."))))
    code = f", exit code {failure['exit_code']}" if failure["exit_code"] is not None else ""
    where = f" ({failure['where']}{code})" if failure["where"] else code
    return f"{error}{where}"


def _describe_oom_kills(end: ProcessEnd | None) -> str:
    """Return a sentence on the kernel's OOM killer, which may have ended a worker; "" if not."""
    if end is None or not end["oom_kills"]:
        return ""
    count = f"{end['oom_kills']} process{'es' if end['oom_kills'] > 1 else ''}"
    return f"The kernel's OOM killer ended {count} of its control group ({_describe_memory_limit(end)})."


def _choose_action(rank: int, evidence: FailedEvidence) -> str:
    failure = evidence.failure
    if evidence.may_be_unseen:
        return "read the logs of the other ranks."
    if evidence.closed_by:
        return f"read the log of {format_rank_list(evidence.closed)}."
    if evidence.closed:
        return f"look for the exit code of {format_rank_list(evidence.closed)} in the job's log."
    if (
        failure["type"] == "MemoryError"
        or "DefaultCPUAllocator" in failure["message"]
        or _describe_oom_kills(evidence.end)
    ):
        return _FREE_MEMORY.format(evidence.host)
    if failure["type"] == "torch.OutOfMemoryError":
        return "use a smaller batch, checkpointing, or sharding (FSDP)."
    return (
        f"read the {'last lines' if failure['type'] == 'SystemExit' else 'traceback'} of rank {rank} in"
        " the job's log."
    )


def _build_died_verdicts(ranks: Sequence[Rank]) -> list[Verdict]:
    """Return a verdict on ranks that died, except those that ran out of device memory; else []."""
    died = [rank for rank in ranks if rank["state"] == DIED and not was_ended_by_oom(rank)]
    if not died:
        return []
    first = min(died, key=_death_order)
    end, host = first["end"], first["host"]
    killed = [
        each
        for each in died
        if each["host"] == host and each["end"] and each["end"]["signal"] == signal.SIGKILL
    ]
    # The OOM killer may have ended only other processes of the group.
    by_oom_killer = end is not None and first in killed and end["oom_kills"] >= len(killed)
    action = f"read the log of rank {first['rank']}."
    if by_oom_killer:
        action = f"{_FREE_MEMORY.format(host)} Or raise the limit."
    elif end is None or not name_end(end) or end["signal"] in (signal.SIGKILL, signal.SIGTERM):
        action = (
            f"look for the reason in the job's log and in `dmesg` on {host} (the kernel's OOM killer), and"
            " check the scheduler's time limit."
        )
    return [
        Verdict(
            kind="died",
            rank=first["rank"],
            since_step=first["last_step"],
            confidence=1.0,
            action=action,
            evidence=DiedEvidence(
                first["last_step"],
                tuple(first["inside"]),
                host,
                end,
                by_oom_killer,
                first["memory"]["max_bytes"] if first["memory"]["device"] is None else None,
                ranks=tuple(rank["rank"] for rank in died),
            ),
        )
    ]


def _death_order(rank: Rank) -> tuple[bool, bool, int, int]:
    """Return a sort key. Launchers end other ranks by SIGTERM after the first one has ended."""
    last = rank["last_step"]
    by_launcher = rank["end"] is not None and rank["end"]["signal"] == signal.SIGTERM
    return by_launcher, last is not None, last or 0, rank["rank"]


def name_end(end: ProcessEnd | None) -> str:
    """Return "SIGSEGV" or "exit code 3"; "" if it is not known how a process ended."""
    if end is None or end["signal"] is None:
        return "" if end is None or end["exit_code"] is None else f"exit code {end['exit_code']}"
    try:
        return signal.Signals(end["signal"]).name
    except ValueError:
        return f"signal {end['signal']}"


def _describe_memory_limit(end: ProcessEnd | None) -> str:
    limit = None if end is None else end["memory_limit_bytes"]
    return "memory of the node" if limit is None else f"cgroup limit {format_bytes(limit, 'B')}"
