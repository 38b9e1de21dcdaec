"""A real job with trainers, engines, a tool and a reward (benchmarks/rl_job.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from torchlens_perf.store.reader import ParquetFile, ParquetFolder


@pytest.mark.long
def test_events_of_all_processes_of_a_job_are_in_its_run(tmp_path: Path) -> None:
    """Each sample is sent, generated, and passes the tool and the reward. Nothing is lost."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rl_job", str(tmp_path), "--iterations", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    events = ParquetFolder(Path(done.stdout.splitlines()[-1]) / "events")
    rows = [row for table in events.read_each(_read) for row in table]

    for event in ("sample_sent", "generation_begin", "generation_end", "tool_end", "reward_end"):
        assert len({id for name, id, _ in rows if name == event}) == 36
    processes = {process.rpartition("-")[0] for _, _, process in rows}
    assert sorted(each.partition("-")[0] for each in processes) == [
        "reward", "rollout", "rollout", "rollout", "tool", "trainer", "trainer",
    ]  # fmt: skip
    assert not [
        each for footer in events.read_each(lambda file: file.footer) for each in footer.values()
        if each["lost"]
    ]  # fmt: skip


def _read(file: ParquetFile) -> list[tuple[str, str, str]]:
    table = file.read_table(("event", "id", "process"))
    return list(zip(*(table[name].to_pylist() for name in ("event", "id", "process")), strict=True))
