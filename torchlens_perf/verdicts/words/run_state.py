"""The state of a run in words: how many ranks were seen, and whether they run, have ended, have died or are silent.

Every surface takes its words from here: the report's title, the page, the notebook, `top` and the list of runs.
"""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

from torchlens_perf.run.rank_ranges import ranges, rank_list
from torchlens_perf.verdicts.words.evidence import DiedEvidence, JudgedVerdict, judged
from torchlens_perf.verdicts.words.oom import ended_by_it

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.verdicts.words.report import Facts, Rank, Run

RUNNING, ENDED, DIED = "running", "ended", "died"
SILENT_S = 60.0
"""The sidecars of a running job write their state every few seconds."""


def run_state(live: bool, died: Sequence[int]) -> str:
    """Return the state for programs: running, ended, or died if a rank did not close its watch."""
    return RUNNING if live else DIED if died else ENDED


def ranks_words(run: Run) -> str:
    """Return the number of ranks, with the number of those that were seen where it is smaller."""
    nodes = f" on {len(run['nodes'])} nodes" if len(run["nodes"]) > 1 else ""
    size, seen = run["world_size"], run["ranks_seen"]
    if seen < size:
        return f"only {seen} of {size} ranks seen{nodes}"
    return f"{size} rank{'s' if size != 1 else ''}{nodes}"


def state_words(run: Run, now_unix_s: float | None = None) -> str:
    """Return the state for people. now_unix_s: the present time, by default this machine's."""
    return state_of(run["live"], run["died"], run["ranks_seen"], _silent_s(run, now_unix_s))


def state_of(live: bool, died: Sequence[int], seen: int, silent_s: float = 0.0) -> str:
    """Return the state in words. seen: how many ranks were seen. silent_s: since when a live run reports nothing."""
    state = "ended"
    if live:
        state = f"silent for {ago(silent_s)}" if silent_s > SILENT_S else "running"
    if not died:
        return state
    if not live and len(died) == seen:
        return "died" if seen == 1 else "all of them died"
    return f"{state}, {rank_list(died)} died"


def _silent_s(run: Run, now_unix_s: float | None) -> float:
    try:
        written_s = datetime.datetime.fromisoformat(run["as_of"] or "").timestamp()
    except ValueError:  # it is not known, or somebody else has written the report
        return 0.0
    return (time.time() if now_unix_s is None else now_unix_s) - written_s


def ago(seconds: float) -> str:
    """Return a long time in words."""
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{int(seconds)} seconds"


def died_verdicts(report: Facts) -> list[JudgedVerdict]:
    """Return a verdict on the ranks that died, but for those that ran out of memory: they have one."""
    died = [rank for rank in report["ranks"] if rank["state"] == DIED and not ended_by_it(rank)]
    if not died:
        return []
    first = min(died, key=lambda rank: (rank["last_step"] is not None, rank["last_step"] or 0, rank["rank"]))
    ranks = tuple(rank["rank"] for rank in died)
    who = f"Rank {ranks[0]} ({first['host']})" if len(ranks) == 1 else f"Ranks {ranges(ranks)}"
    where = _where(first) if len(ranks) == 1 else f"(rank {first['rank']} {_where(first)})"
    text = (
        f"{who} died {where}: a signal, a crash or os._exit() ended the process before its watch. Next: read the "
        f"job's log, `dmesg` on {first['host']} (the kernel's OOM killer) and the scheduler's time limit."
    )
    evidence = DiedEvidence(ranks, first["last_step"], tuple(first["inside"]))
    return [judged("died", first["rank"], None, None, None, first["last_step"], 1.0, text, evidence)]


def _where(rank: Rank) -> str:
    after = "before its first step ended" if rank["last_step"] is None else f"after step {rank['last_step']}"
    return f"{after}, in {' > '.join(rank['inside'])}" if rank["inside"] else after
