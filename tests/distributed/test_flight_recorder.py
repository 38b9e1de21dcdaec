"""Dumps that the installed torch writes are read, whatever its version."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

from tests.support import progress
from tests.support.gloo import run_ranks
from tests.support.servers import wait_for
from torchlens_perf.sidecar.hang_witness.flight_recorder import find_dumps, read_dump
from torchlens_perf.sidecar.hang_witness.judge import judge_dumps

pytestmark = pytest.mark.distributed


def call_late(folder: Path) -> None:
    """Rank 1 calls the second all_reduce after both ranks have written their dumps."""
    path = folder / f"trace_{dist.get_rank()}"
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        assert wait_for((folder / "trace_0").exists, 100)
        path.write_bytes(_dump_fr_trace())
    work = dist.all_reduce(torch.ones(5), async_op=True)
    if dist.get_rank() == 0:
        path.write_bytes(_dump_fr_trace())
    work.wait()


def test_dumps_of_this_torch_show_the_missing_rank(tmp_path: Path) -> None:
    began_ns = time.time_ns()
    run_ranks(call_late, tmp_path)
    read = {
        rank: read_dump(path, rank, 2, began_ns)
        for rank, path in find_dumps(str(tmp_path / "trace_"))
    }
    dumps = {rank: dump for rank, dump in read.items() if dump is not None}
    hang = judge_dumps({rank: progress.rank(rank) for rank in range(2)}, dumps)

    assert hang is not None
    assert (progress.named(hang), hang.waiting) == ([1], (0,))
    assert hang.collective is not None
    assert hang.collective.operation == "all_reduce of [5] Float"
    assert re.fullmatch(r"test_flight_recorder\.py:\d+ in call_late", dumps[0].line)
    assert dumps[1].line == ""
