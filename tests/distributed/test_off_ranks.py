"""Tests of ranks that cannot record, in a job with ranks that can.

No rank waits. One printed line per node and the report show which ranks are missing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.processes import TRAIN, report, run, run_warm, runs, torchrun

pytestmark = pytest.mark.distributed
FLAG = ("--logs-specs", "torchlens_perf")
# Under the flag a rank begins to record at the end of its first step. Until the end of that step
# the script can change the rank's environment.
CHANGED = "import os, sys\nif int(os.environ['RANK']) in ({ranks}): {change}\n"
NO_PROGRAM = "sys.executable = ''"
NO_ROOM = "from pathlib import Path; from torchlens_perf.run import directory; " \
    "directory._local_parent_folders = lambda: iter([Path('/proc/nowhere')])"  # fmt: skip


def job(
    folder: Path, ranks: int, off: str, change: str, **environment: str
) -> tuple[str, list[str], list[str]]:
    """Train with `change` applied on the ranks `off`.

    Return the job's result, our messages about missing ranks, and all our output lines.
    """
    script = folder / "train.py"
    script.write_text(CHANGED.format(ranks=off, change=change) + Path(TRAIN).read_text())
    done = run_warm(torchrun(*FLAG, str(script), ranks=ranks), folder, timeout_s=110, **environment)
    assert done.returncode == 0, done.stderr
    trained = next(line for line in done.stdout.splitlines() if line.startswith("parameters"))
    ours = [line for line in done.stderr.splitlines() if "torchlens" in line]
    return trained, [line for line in ours if "torchlens_perf is off: " in line], ours


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the result of two unrecorded ranks."""
    return job(tmp_path_factory.mktemp("unwatched"), 2, "9,", "pass", TORCHLENS_PERF="0")[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *long(
            (NO_ROOM, "can be written"),
            (NO_PROGRAM, "no process can be started"),
            ("os.environ['LOCAL_WORLD_SIZE'] = 'abc'", ""),
        ),
    ],
)
def test_report_names_the_rank_that_cannot_record(
    change: str, reason: str, unwatched: str, tmp_path: Path
) -> None:
    """The other rank is recorded."""
    trained, off, _ = job(tmp_path, 2, "1,", change)
    value = report(runs(tmp_path)[0])

    assert trained == unwatched
    # If rank 0 cannot record, the node's number of ranks is used as the job's number.
    if not reason:
        assert [rank["rank"] for rank in value["ranks"]] == [0, 1]
        return
    assert len(off) == 1
    assert reason in off[0]
    assert [(rank["rank"], rank["steps"]) for rank in value["ranks"]] == [(0, 29)]
    assert "1 of 2 ranks are missing: 1" in value["quality"]["notes"]


@pytest.mark.long
def test_other_rank_is_recorded_when_rank_0_cannot_record(unwatched: str, tmp_path: Path) -> None:
    """Rank 0 prints no report."""
    trained, off, ours = job(tmp_path, 2, "0,", NO_PROGRAM)
    value = report(runs(tmp_path)[0])

    assert trained == unwatched
    assert ours == off
    assert len(off) == 1
    assert [(rank["rank"], rank["steps"]) for rank in value["ranks"]] == [(1, 29)]


@pytest.mark.parametrize("how", ["a file in the way", *long("no process")])
def test_one_line_per_node_is_printed_when_no_rank_can_record(
    how: str, unwatched: str, tmp_path: Path
) -> None:
    """No file is left."""
    (tmp_path / "file").write_text("in the way")
    folder = (
        {"TORCHLENS_PERF_DIR": str(tmp_path / "file" / "runs")}
        if how == "a file in the way"
        else {}
    )
    change = "pass" if folder else NO_PROGRAM
    trained, off, ours = job(tmp_path, 2, "0, 1", change, **folder)

    assert trained == unwatched
    assert ours == off
    assert len(off) == 1
    assert sorted(os.listdir(tmp_path)) == ["file", "train.py"]


@pytest.mark.long
def test_script_that_calls_watch_continues_when_recording_is_off(tmp_path: Path) -> None:
    """The run directory of the script's watch is None."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch, torchlens_perf as perf\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "sys.executable = ''\n"
        "with perf.watch(model, optimizer) as w:\n"
        "    for _ in range(5):\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); w.step()\n"
        "with perf.watch(model): pass\n"
        "print(w.run_dir)\n"
    )
    done = run(torchrun(str(script), ranks=3), tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "None\n" * 3
    assert done.stderr.count("torchlens_perf is off: ") == 2, "one for each watch"
    assert os.listdir(tmp_path) == ["train.py"]
