"""A check of two real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import free_port

SECONDS = "2"


def start_check(folder: Path, rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """Start one of two ranks, as a shell loop would. Both write JSON into the folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "torchlens_perf", "check", "--seconds", SECONDS, *arguments],
        env={
            "PATH": "/usr/bin:/bin", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        },
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.long
def test_two_ranks_measure_everything_and_end_with_the_same_code(tmp_path: Path) -> None:
    port = free_port()
    ranks = [start_check(tmp_path, rank, port, "--json", "found.json") for rank in range(2)]
    printed = [rank.communicate(timeout=100) for rank in ranks]
    found = json.loads((tmp_path / "found.json").read_text())

    assert [rank.returncode for rank in ranks] == [found["exit_code"]] * 2, printed
    assert "matmul float32" in printed[0][0]
    assert printed[1][0] == ""
    host = found["ranks"][0]["host"]
    group = f"{host}/0 {host}/1"
    for rank in found["ranks"]:
        places = [place for values in rank["values"].values() for place in values]
        assert places.count(group) == 15
        assert len(rank["values"]["matmul float32"][f"{host}/{rank['rank']}"]) in (5, 10)
    assert found["ranks"][0]["values"]["disk write"][host][0] > 0
    assert not list(tmp_path.glob("torchlens-perf/2*")), "a check is no run"


@pytest.mark.long
def test_rank_that_dies_is_named_and_the_check_ends(tmp_path: Path) -> None:
    port = free_port()
    ranks = [start_check(tmp_path, rank, port, "--seconds", "30") for rank in range(2)]
    try:
        ranks[1].communicate(timeout=12)
    except subprocess.TimeoutExpired:
        ranks[1].kill()
    printed, _ = ranks[0].communicate(timeout=60)

    assert printed.startswith("NO ANSWER  Rank 1: ")
    assert ranks[0].returncode == 1
