"""Sentences on a hang by what PyTorch's Flight Recorder and NCCL's RAS service have recorded."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torchlens_perf.analysis.collectives.hang import Hang
from torchlens_perf.errors import printable
from torchlens_perf.verdicts.words.hang import describe_different_calls, format_ranks

_RECORDER, _RAS = "PyTorch's Flight Recorder", "NCCL's RAS service reports"
_MAX_BLOCKS, _MAX_DETAILS = 3, 4
# The total number of processes in the table "Job summary". NCCL prints another table if it differs
# between nodes.
_PROCESSES = re.compile(r"\(total\)\n +\d+ +\d+ +\d+ +(\d+) +\d+\n")
_NOT_ANSWERING = re.compile(r"^(?:DEAD|.*INCOMPLETE)\n(?:  .*\n)*", re.MULTILINE)
_PID = re.compile(r"[Pp]rocess (\d+) on node")


def describe_dumps(hang: Hang, by_dumps: Hang | None, dumped: Collection[int]) -> str:
    """Return what the dumps of the Flight Recorder add, and whether they agree with the finding.

    by_dumps: the hang as the dumps show it. dumped: ranks with a dump.
    """
    if not dumped:
        return ""
    ours = [each.progress.rank for each in hang.blocking]
    theirs = [] if by_dumps is None else [each.progress.rank for each in by_dumps.blocking]
    where = None if by_dumps is None else by_dumps.collective
    missing = [rank for places in hang.places.values() for rank in places if rank not in dumped]
    without = f" No dump of {format_ranks(missing)} was found." if missing else ""
    if by_dumps is None or where is None or not (theirs or by_dumps.operations):
        return f"{_RECORDER} shows no rank that is behind.{without}"
    number = f"collective {where.sequence} of group {where.group} ({where.operation})"
    found = f"{format_ranks(theirs)} did not enter {number}."
    if by_dumps.kind == "device":
        found = f"the kernel of {number} has not begun on {format_ranks(theirs)}."
    elif by_dumps.operations:
        found = describe_different_calls(by_dumps, where)
    agrees = set(theirs) == set(ours) if theirs else hang.kind == "mismatch"
    if agrees:
        return f"{_RECORDER} confirms it: {found}{without}"
    differs = f" This differs from the finding on {format_ranks(ours)}." if ours else ""
    return f"{_RECORDER} shows: {found}{differs}{without}"


def describe_ras(hang: Hang, answer: str, world_size: int, ranks: Mapping[int, int]) -> str:
    """Return what NCCL's RAS service reports; "" for an incomplete answer or of another job.

    ranks: ranks of this node by process id.
    """
    _, complete, problems = answer.partition("\nErrors\n")
    processes = _PROCESSES.search(answer)
    if not complete or (processes and int(processes[1]) != world_size):
        return ""
    blocks: list[list[str]] = []
    for line in problems.splitlines():
        if line.startswith("  ") and blocks:
            blocks[-1].append(line.strip())
        elif line.strip("= ") and line != "Warnings":
            blocks.append([line.strip()])
    if not blocks:
        is_whole = "Warnings\n" in problems and "No communicator data" not in answer
        return f"{_RAS} no missing process and equal numbers of operations." if is_whole else ""
    texts = [
        f"{head}: {'; '.join(details[:_MAX_DETAILS])}{'; and more' * (len(details) > _MAX_DETAILS)}"
        for head, *details in blocks[:_MAX_BLOCKS]
    ]
    named = {each.progress.rank for each in hang.blocking}
    silent = "".join(_NOT_ANSWERING.findall(problems))
    theirs = {ranks[pid] for pid in map(int, _PID.findall(silent)) if pid in ranks}
    which = f" These processes are {format_ranks(sorted(theirs))}" if theirs else ""
    if which:
        which += ", unlike the finding." if named and theirs.isdisjoint(named) else "."
    return printable(f"{_RAS} {', '.join(texts)}.{which}")
