"""A check of two real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.servers import free_port

SECONDS = "2"


def start_check(
    folder: Path, rank: int, port: int, *arguments: str, size: int = 2
) -> subprocess.Popen[str]:
    """Start one of the ranks, as a shell loop would. They write JSON into the folder."""
    arguments = "-m", "torchlens_perf", "check", "--seconds", SECONDS, *arguments
    return start_python(folder, rank, port, size, *arguments)


def start_python(
    folder: Path, rank: int, port: int, size: int, *arguments: str
) -> subprocess.Popen[str]:
    """Start Python as a rank."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={
            "PATH": "/usr/bin:/bin", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
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


@pytest.mark.long
def test_rank_0_that_is_stopped_is_named_by_rank_1_and_by_itself(tmp_path: Path) -> None:
    port = free_port()
    ranks = [
        start_check(tmp_path, rank, port, "--seconds", "60", "--json", f"{rank}.json", size=4)
        for rank in range(4)
    ]
    try:
        store = TCPStore("127.0.0.1", port, None, timeout=timedelta(seconds=100))
        # All ranks measure, and have seen beats of rank 0.
        store.wait([f"torchlens_perf/check/0/stage/{rank}" for rank in range(4)])
        time.sleep(5)
        ranks[0].send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        codes = [rank.wait(timeout=60) for rank in ranks[1:]]
        waited_s = time.monotonic() - stopped_s
        ranks[0].send_signal(signal.SIGCONT)
        ranks[0].wait(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()

    assert codes == [1, 1, 3]
    assert 10 < waited_s < 40
    assert not (tmp_path / "3.json").exists()
    for rank, reason in (0, "was stopped for "), (1, "gave rank 1 no sign of life for 10 s"):
        [verdict] = json.loads((tmp_path / f"{rank}.json").read_text())["verdicts"]
        assert verdict["text"].startswith(f"Rank 0: {reason}")
    assert ranks[0].returncode == 1


@pytest.mark.long
@pytest.mark.parametrize("absent", [0, 1])
def test_rank_that_never_arrives_is_named(tmp_path: Path, absent: int) -> None:
    code = (
        "from torchlens_perf.check.ranks import Ranks; import os\n"
        "from torchlens_perf.run.place.launcher import detect_place\n"
        "def report(ranks, reason): print(ranks, reason, flush=True); return 1\n"
        "Ranks(detect_place(os.environ, None), 12.0, report)"
    )
    port = free_port()
    other = start_python(tmp_path, 1 - absent, port, 2, "-c", code)
    printed, _ = other.communicate(timeout=60)

    assert printed == f"[{absent}] did not respond in time during the start\n"
    assert other.returncode == 1


@pytest.mark.long
def test_check_that_is_slow_goes_on_while_stages_end(tmp_path: Path) -> None:
    code = (
        "from torchlens_perf.check.ranks import Ranks; import os, time\n"
        "from torchlens_perf.run.place.launcher import detect_place\n"
        "ranks = Ranks(detect_place(os.environ, None), 3.0, lambda ranks, reason: 1)\n"
        "for _ in range(3): ranks.meet('a stage'); time.sleep(2)\n"
        "ranks.close(); print('finished')"
    )
    alone = start_python(tmp_path, 0, free_port(), 1, "-c", code)

    assert alone.communicate(timeout=60)[0] == "finished\n"
    assert alone.returncode == 0
