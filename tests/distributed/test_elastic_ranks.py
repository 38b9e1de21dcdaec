"""Tests that ranks leave, or fail and return, in the same world or a smaller one.

A watched job continues in the same way as an unwatched job.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.elastic_ranks import BEFORE, SMALLEST, STEPS
from tests.support.processes import SCRIPTS, clean_environ, report, run_warm, runs, torchrun
from tests.support.recording import Recording
from tests.support.servers import free_port
from tests.support.warm_python import WarmPython
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.distributed

SCRIPT = str(SCRIPTS / "elastic_ranks.py")
# torchrun's own store keeps the addresses of the first attempt. With that store, gloo therefore
# fails to connect, with or without a watch.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def sums(command: list[str], folder: Path, **environment: str) -> list[str]:
    """Return the sums in the job's output."""
    done = run_warm(command, folder, **OWN_STORE, **environment)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("sums")]


def recordings(run_directory: RunDirectory) -> dict[tuple[int, int], Recording]:
    """Return the recordings by attempt and rank, from the ring files of a run without a sidecar."""
    found = {}
    for ring in (run_directory.path / "rings").glob("*.ring"):
        recording = Recording()
        recording.load(ring)
        identity = recording.metadata["identity"]
        found[identity["attempt"], identity["rank"]] = recording
    return found


def numbers(recording: Recording) -> dict[str, dict[int, int]]:
    """Return the job's step of each collective by group and number.

    The size of a collective's payload identifies the step.
    """
    found: dict[str, dict[int, int]] = {}
    for each in recording.of(Kind.COLLECTIVE):
        group = each.name.partition(" group=")[2].partition(" ")[0]
        found.setdefault(group, {})[each.value1 & 0xFFFFFFFF] = each.value0 // 4 - SMALLEST
    return found


@pytest.mark.long
def test_job_continues_after_the_process_of_a_rank_ends(tmp_path: Path) -> None:
    """The other ranks continue in a new group with the same sums and consistent numbers."""
    command = torchrun(SCRIPT, "--leaves", "2", ranks=3)
    unwatched = sums(command, tmp_path, TORCHLENS_PERF="0")
    assert sums(command, tmp_path, TORCHLENS_PERF_SIDECAR="0") == unwatched
    (made,) = runs(tmp_path)
    found = recordings(made)

    assert set(found) == {(0, 0), (0, 1), (0, 2)}
    assert [len(found[0, rank].steps) for rank in range(3)] == [STEPS, STEPS, BEFORE]
    assert numbers(found[0, 0]) == numbers(found[0, 1])
    first, second = numbers(found[0, 0]).values()
    assert [list(first.values()), list(second.values())] == [
        [*range(BEFORE)],
        [*range(BEFORE, STEPS)],
    ]
    assert list(numbers(found[0, 2]).values()) == [first]


def test_report_blames_no_rank_and_misses_none_after_a_rank_leaves(tmp_path: Path) -> None:
    """With a sidecar, a run that a rank has left ends without delay."""
    assert sums(torchrun(SCRIPT, "--leaves", "2", ranks=3), tmp_path)
    (made,) = runs(tmp_path)
    value = report(made)

    assert {rank["state"] for rank in value["ranks"]} == {"closed"}
    assert [rank["steps"] for rank in value["ranks"]] == [STEPS, STEPS, BEFORE]
    assert "hang" not in {verdict.kind for verdict in value["verdicts"]}
    assert value["quality"]["lost"] == 0


@pytest.mark.long
def test_collectives_are_numbered_from_the_start_after_a_restart(tmp_path: Path) -> None:
    """torchrun restarts all ranks, and the job computes the right sums."""
    command = torchrun("--max-restarts", "1", SCRIPT, "--fails", "1", ranks=3)
    unwatched = sums(command, tmp_path, TORCHLENS_PERF="0")
    assert sums(command, tmp_path, TORCHLENS_PERF_SIDECAR="0") == unwatched
    (made,) = runs(tmp_path)
    found = recordings(made)

    assert set(found) == {(attempt, rank) for attempt in range(2) for rank in range(3)}
    for rank in range(3):
        (numbered,) = numbers(found[1, rank]).values()
        assert numbered == {number: number for number in range(STEPS)}
        # The ranks that did not fail may have issued one more collective than the failed rank.
        (before,) = numbers(found[0, rank]).values()
        assert before in (
            {n: n for n in range(BEFORE)},
            {n: n for n in range(BEFORE + (rank != 1))},
        )


class Agents:
    """Two torchrun agents of one elastic job, each with one rank.

    Each agent represents a node that may leave.
    """

    def __init__(self, folder: Path, port: int, **environment: str) -> None:
        self.folder = folder
        environ = clean_environ({"TORCHLENS_PERF_RUN_ID": "shrinks", **OWN_STORE, **environment})
        self.processes = []
        for node in range(2):
            meeting = f"last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=2,is_host={1 - node}"
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
                "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
                "--rdzv-id", "job", "--rdzv-conf", meeting, "--local-addr", "127.0.0.1", SCRIPT, "--shrinks",
            ]  # fmt: skip
            with open(folder / f"agent{node}", "wb") as log:
                self.processes.append(
                    WarmPython(command, cwd=folder, env=environ, stdout=log, stderr=log)
                )

    def read_output(self, node: int) -> str:
        return (self.folder / f"agent{node}").read_text()

    def wait_until_both_train(self) -> None:
        deadline_s = time.monotonic() + 60
        while not all("of 2 trains" in self.read_output(node) for node in range(2)):
            assert time.monotonic() < deadline_s, self.read_output(0) + self.read_output(1)
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.processes:
            # A killed agent would leave its rank behind.
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def shrink(folder: Path, **environment: str) -> list[str]:
    """Start in a world of two and remove one node. Return the sums that the remaining node prints."""
    folder.mkdir()
    agents = Agents(folder, free_port(), **environment)
    try:
        agents.wait_until_both_train()
        time.sleep(1)
        agents.processes[1].send_signal(signal.SIGTERM)
        assert agents.processes[0].wait(60) == 0, agents.read_output(0)
    finally:
        agents.close()
    return [line for line in agents.read_output(0).splitlines() if line.startswith("sums")]


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, dict[str, Any]]:
    """Return a run that began on two nodes and ended on one, with its sidecar and report."""
    folder = tmp_path_factory.mktemp("shrunk")
    assert shrink(folder / "watched") == shrink(folder / "unwatched", TORCHLENS_PERF="0") != []
    (made,) = runs(folder / "watched")
    return made, report(made)


@pytest.mark.long
def test_report_has_all_steps_after_a_restart_in_a_smaller_world(
    shrunk: tuple[RunDirectory, dict[str, Any]],
) -> None:
    """The sums are those of the unwatched job.

    The report contains all steps of the last attempt.
    """
    _, value = shrunk
    (first,) = [rank for rank in value["ranks"] if rank["rank"] == 0]

    assert (value["run"]["attempt"], value["run"]["live"]) == (1, False)
    assert (first["attempt"], first["steps"], first["state"]) == (1, STEPS, "closed")
    assert value["quality"]["lost"] == 0
    assert "hang" not in {verdict.kind for verdict in value["verdicts"]}


@pytest.mark.long
def test_rank_of_an_earlier_world_is_not_in_the_report(
    shrunk: tuple[RunDirectory, dict[str, Any]],
) -> None:
    """The report's world size, ranks and step times are those of the last attempt only."""
    _, value = shrunk

    assert value["run"]["world_size"] == 1
    assert [rank["rank"] for rank in value["ranks"]] == [0]
    assert value["steps"]["count"] == STEPS


@pytest.mark.long
def test_run_directory_contains_the_separate_steps_of_both_attempts(
    shrunk: tuple[RunDirectory, dict[str, Any]],
) -> None:
    import pandas as pd

    made, _ = shrunk
    steps = pd.read_parquet(made.steps)

    assert set(
        steps.groupby("attempt")["rank"].unique().map(lambda ranks: tuple(sorted(ranks)))
    ) == {(0, 1), (0,)}
    assert steps[steps["attempt"] == 1]["step"].tolist() == [*range(STEPS)]
