"""Read the dumps that PyTorch's Flight Recorder writes when a collective times out.

A dump is a pickle of containers, numbers and texts, or JSON. Its format is that of version 2 in
torch/csrc/distributed/c10d/FlightRecorder.hpp. Nothing else is unpickled.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchlens_perf.errors import DAMAGED_DATA
from torchlens_perf.run import ownership
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.sidecar.hang_witness.judge import RankDump, describe_call
from torchlens_perf.sidecar.host.stacks import find_user_line

_MAX_BYTES, _MAX_FILES = 1 << 26, 256
# Number of a group's last collectives that are compared.
_KEPT_CALLS = 16
_VERSION = "2."


class _ContainersOnly(pickle.Unpickler):
    """Unpickler that creates no object of a class and calls no function."""

    def find_class(self, module_name: str, global_name: str) -> object:
        raise pickle.UnpicklingError(f"a dump contains no {module_name}.{global_name}")


def find_dumps(prefix: str) -> Iterator[tuple[int, Path]]:
    """Yield the rank and the path of each dump, whose name ends with its rank. Raise OSError."""
    folder, start = os.path.split(prefix)
    with os.scandir(folder or ".") as entries:
        ends = [each.name[len(start) :] for each in entries if each.name.startswith(start)]
    ranks = sorted(int(end) for end in ends if end.isdecimal())
    yield from ((rank, Path(f"{prefix}{rank}")) for rank in ranks[:_MAX_FILES])


def read_dump(path: Path, rank: int, world_size: int, since_ns: int) -> RankDump | None:
    """Return the dump of a rank; None if it is of another run or has no collective.

    since_ns: Unix time at which the run began.

    Raise OSError, or ValueError if the file is no dump, as while torch writes it.
    """
    content = ownership.read_regular_file(path, _MAX_BYTES)
    try:
        is_json = content.startswith(b"{")
        dump = json.loads(content) if is_json else _ContainersOnly(io.BytesIO(content)).load()
        return _build_rank_dump(dump, rank, world_size, since_ns)
    except (*DAMAGED_DATA, EOFError, MemoryError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no dump: {type(error).__name__}: {error}") from None


def _build_rank_dump(dump: Any, rank: int, world_size: int, since_ns: int) -> RankDump | None:
    entries = [each for each in dump["entries"] if not each["is_p2p"]]
    # gloo does not record the members of its groups.
    members = {
        name: tuple(map(int, json.loads(group["ranks"])))
        for name, group in dump["pg_config"].items()
    }
    is_of_run = max(rank, *itertools.chain((rank,), *members.values())) < world_size
    is_of_run &= all(each["time_created_ns"] >= since_ns for each in entries)
    if not (dump["version"].startswith(_VERSION) and entries and is_of_run):
        return None
    # Groups that one split has created share a name.
    names = {
        name: f"{name} of {format_rank_list(ranks)}" for name, ranks in members.items() if ranks
    }
    calls: dict[str, dict[int, str]] = {}
    began: dict[str, int] = {}
    for each in entries:
        # Records of collectives count from 0, and torch from 1.
        name, sequence = str(each["process_group"][0]), int(each["collective_seq_id"]) - 1
        calls.setdefault(names.get(name, name), {})[sequence] = describe_call(
            each["profiling_name"], each["input_sizes"], each["input_dtypes"]
        )
        if each["state"] != "scheduled":
            began[names.get(name, name)] = sequence
    unfinished = (each for each in entries if each["state"] != "completed" and not each["retired"])
    # JSON has no frames.
    frames = [
        (str(frame["filename"]), frame["line"], frame["name"])
        for frame in (next(unfinished, None) or {}).get("frames", ())
    ]
    return RankDump(
        {names[name]: ranks for name, ranks in members.items() if ranks},
        {group: dict(list(found.items())[-_KEPT_CALLS:]) for group, found in calls.items()},
        began,
        find_user_line(frame for frame in frames if frame[0].endswith(".py")),
        dump["entries"][0]["record_id"] == 0,
    )
