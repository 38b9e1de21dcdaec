"""The state of a run in words: how many ranks were seen, and whether they run, have ended or have
died.

All screens use these words: the report's title, the page, the notebook, `top` and the list of runs.
"""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

from torchlens_perf.run.rank_ranges import format_ranges, format_rank_list
from torchlens_perf.verdicts.words.evidence import DiedEvidence, JudgedVerdict, make_verdict
from torchlens_perf.verdicts.words.oom import was_ended_by_oom

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.verdicts.words.report import Facts, Rank, Run

RUNNING, ENDED, DIED = "running", "ended", "died"
SILENT_S = 60.0
"""A live run is called silent after this time without new data. Sidecars write every few seconds.
"""


def run_state(live: bool, died: Sequence[int]) -> str:
    """Return RUNNING for a live run, DIED if a rank died, else ENDED."""
    return RUNNING if live else DIED if died else ENDED


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
    return describe_state(run["live"], run["died"], run["ranks_seen"], _silent_s(run, now_unix_s))


def describe_state(live: bool, died: Sequence[int], seen: int, silent_s: float = 0.0) -> str:
    """Return the state of a run in words.

    seen: number of ranks seen. silent_s: time without new data from a live run.
    """
    state = "ended"
    if live:
        state = f"silent for {format_age(silent_s)}" if silent_s > SILENT_S else "running"
    if not died:
        return state
    if not live and len(died) == seen:
        return "died" if seen == 1 else "all of them died"
    return f"{state}, {format_rank_list(died)} died"


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


def build_died_verdicts(report: Facts) -> list[JudgedVerdict]:
    """Return a verdict on ranks that died, except those that ran out of device memory; else []."""
    died = [
        rank for rank in report["ranks"] if rank["state"] == DIED and not was_ended_by_oom(rank)
    ]
    if not died:
        return []
    first = min(
        died, key=lambda rank: (rank["last_step"] is not None, rank["last_step"] or 0, rank["rank"])
    )
    ranks = tuple(rank["rank"] for rank in died)
    who = (
        f"Rank {ranks[0]} ({first['host']})" if len(ranks) == 1 else f"Ranks {format_ranges(ranks)}"
    )
    where = (
        _describe_death_place(first)
        if len(ranks) == 1
        else f"(rank {first['rank']} {_describe_death_place(first)})"
    )
    text = (
        f"{who} died {where}: a signal, a crash or os._exit() ended the process before watch() was closed."
        f" Next: read the job's log, `dmesg` on {first['host']} (the kernel's OOM killer) and the"
        " scheduler's time limit."
    )
    evidence = DiedEvidence(ranks, first["last_step"], tuple(first["inside"]))
    return [
        make_verdict(
            "died", first["rank"], None, None, None, first["last_step"], 1.0, text, evidence
        )
    ]


def _describe_death_place(rank: Rank) -> str:
    after = (
        "before its first step ended"
        if rank["last_step"] is None
        else f"after step {rank['last_step']}"
    )
    return f"{after}, in {' > '.join(rank['inside'])}" if rank["inside"] else after
