"""Judge a hang by dumps of PyTorch's Flight Recorder. Pure.

Each rank's dump contains its last collectives, as torch.distributed has issued them. The dumps are
judged by the rules of hang.py. Dumps are compared with each other only, because some backends count
other operations than the records of this package do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchlens_perf.analysis.collectives.device_progress import RankProgress
from torchlens_perf.analysis.collectives.hang import Hang, find_hang
from torchlens_perf.analysis.collectives.semantics import semantics_of


@dataclasses.dataclass(frozen=True)
class RankDump:
    """The last collectives of one rank."""

    groups: Mapping[str, tuple[int, ...]]
    """Members of each process group that the rank knows."""
    calls: Mapping[str, Mapping[int, str]]
    """For each group, calls by sequence number, such as {57: "all_reduce of [1024] Float"}."""
    began: Mapping[str, int]
    """For each group, the last sequence number whose kernel has started, if any has."""
    line: str
    """Line of the user's code that issued the oldest unfinished collective; "" if none is known."""
    is_whole: bool
    """True if the dump has all collectives since the start of the process."""


def describe_call(name: str, sizes: list[list[int]], dtypes: list[str]) -> str:
    """Return a call with the sizes and data types that must be equal on all ranks.

    name: a name such as "nccl:_all_gather_base".
    """
    operation = name.partition(":")[2]
    meaning = semantics_of(operation.strip("_").replace("all_", "all"))
    tensors = " ".join(str(each).replace(" ", "") for each in sizes) if meaning.equal_bytes else ""
    types = " ".join(dict.fromkeys(dtypes)) if meaning.equal_dtype else ""
    parts = " ".join(filter(None, (tensors, types)))
    return f"{operation} of {parts}" if parts else operation


def judge_dumps(ranks: Mapping[int, RankProgress], dumps: Mapping[int, RankDump]) -> Hang | None:
    """Return the hang as the dumps show it, or None if they show none.

    ranks: the progress of the ranks that hang.
    """
    groups = {name: members for dump in dumps.values() for name, members in dump.groups.items()}
    by_dump = {
        rank: dataclasses.replace(
            ranks[rank],
            report_age_s=0.0,
            state="running",
            issued={group: max(calls) for group, calls in dump.calls.items()},
            operations=dump.calls,
            sizes={},
            dtypes={},
            all_groups=dump.is_whole,
            began=dump.began,
            device=None,
        )
        for rank, dump in dumps.items()
        if rank in ranks
    }
    return find_hang(by_dump, groups)
