"""Who a rank is, from the environments that launchers make."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchlens_perf.run import directory, identity
from torchlens_perf.run.directory import claim_run_id

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "991", "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "pretrain",
}  # fmt: skip


def detect(environ: dict[str, str], nth_watch: int = 0) -> identity.Identity:
    return identity.detect(environ, lambda digest, origin: f"claimed-{digest}", nth_watch)


def test_torchrun() -> None:
    """torchrun's variables name rank, node and attempt."""
    found = detect(TORCHRUN)

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (5, 1, 8, 4)
    assert (found.attempt, found.elastic, found.pid) == (2, True, os.getpid())
    assert found.attributes["torch.elastic.max_restarts"] == "3"


def test_slurm() -> None:
    """Under srun, Slurm's variables serve where torchrun's are missing."""
    found = detect(SLURM)

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (3, 1, 4, 4)
    assert (
        found.attributes.items() >= {"slurm.job.id": "991", "slurm.step.id": "0", "slurm.job.name": "pretrain"}.items()
    )


def test_alone() -> None:
    """Without a launcher there is one rank."""
    found = detect({})

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (0, 0, 1, 1)
    assert (found.attempt, found.elastic) == (0, False)


@pytest.mark.parametrize("text", ["first", "-2", "", " ", "²", "٣", "1e3", "0x1", "9" * 10, "9" * 5000, "\udcff"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"])
def test_malformed_numbers_are_ignored(name: str, text: str) -> None:
    """A launcher's variable that is no number is as good as none."""
    assert dataclasses.replace(detect({name: text}), run_id="") == dataclasses.replace(detect({}), run_id="")


@pytest.mark.parametrize("port", ["", "http", "²", "9" * 5000])
def test_malformed_port_is_no_store(port: str) -> None:
    """MASTER_PORT that is no number: nobody said where the store is."""
    assert identity.job_store({"MASTER_ADDR": "node-a", "MASTER_PORT": port}) is None


@pytest.mark.parametrize("told", ["...", ".", ""])
def test_told_run_id_that_names_nothing(told: str) -> None:
    """What is left of it after cleaning names a folder, or the run id is claimed."""
    assert detect({"TORCHLENS_PERF_RUN_ID": told}, nth_watch=1).run_id.startswith("claimed-")


def test_run_id_is_the_launchers_on_one_node() -> None:
    """On one node the run id is claimed with a digest of the launcher: the same for all of its children."""
    one_node = {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}
    first, second = detect({**one_node, "RANK": "0"}), detect({**one_node, "RANK": "7"})

    assert first.run_id == second.run_id
    assert first.run_id.startswith("claimed-")
    assert detect(one_node, nth_watch=2).run_id == first.run_id + "-3"
    assert detect({}).run_id != first.run_id


def test_run_id_over_several_nodes_is_told() -> None:
    """Over several nodes only what all of them are told can name the run: torchrun's or Slurm's id."""
    assert detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": "job/7 a"}).run_id == "job_7_a"
    assert detect({**SLURM, "LOCAL_WORLD_SIZE": "2"}).run_id == "slurm-991.0"
    assert detect(TORCHRUN).run_id.startswith("claimed-")
    assert detect({"TORCHLENS_PERF_RUN_ID": "../mine"}).run_id == "_mine"


def test_process_is_told_from_its_successor() -> None:
    """A process has a start time; one that has ended, or is only a zombie, has none."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = identity.process_started(child.pid)

    assert started is not None
    assert started >= identity.process_started(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert identity.process_started(child.pid) is None
    child.wait()
    assert identity.process_started(child.pid) is None


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shared memory of the test's own."""
    monkeypatch.setattr(directory, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_claimed_run_id_is_the_same_for_all(local: Path) -> None:
    """Ranks that claim at different times get the first one's answer; another launcher gets its own."""
    launcher = os.getppid()
    first = claim_run_id("abc", launcher)

    assert first.startswith(time.strftime("%Y%m%d-"))
    assert claim_run_id("abc", launcher) == first
    assert claim_run_id("def", launcher).endswith("-def")


def test_lone_process_leaves_no_claim(local: Path) -> None:
    """Nobody else asks for its run id."""
    assert claim_run_id("abc", os.getpid()).endswith("-abc")
    assert list(local.iterdir()) == []


def test_claims_of_dead_launchers_are_forgotten(local: Path) -> None:
    """Not those of living ones, nor those of another namespace, whose process ids say nothing here."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claim_run_id("dead", child.pid)
    claim_run_id("alive", os.getppid())
    folder = next(directory.local_folders(""))
    (folder / f".run-1-{child.pid}-5-elsewhere").symlink_to("run:x")
    child.kill()
    child.wait()
    claim_run_id("new", os.getppid())

    assert sorted(path.name.rpartition("-")[2] for path in folder.iterdir()) == ["alive", "elsewhere", "new"]


def test_many_processes_claim_at_once(local: Path) -> None:
    """Eight processes that claim at the same moment agree."""
    program = (
        "import sys; from pathlib import Path; from torchlens_perf.run import directory\n"
        "directory._SHARED_MEMORY = Path(sys.argv[1])\n"
        "input(); print(directory.claim_run_id('abc', int(sys.argv[2])))"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(local), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()

    claimed = {child.communicate()[0] for child in children}
    assert len(claimed) == 1
    assert claimed.pop().endswith("-abc\n")


def test_kubernetes() -> None:
    """In a pod, the pod's name is known without any set-up."""
    found = detect({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0", "K8S_NAMESPACE": "ml"})

    assert found.attributes == {"k8s.pod.name": "train-0", "k8s.namespace.name": "ml"}
