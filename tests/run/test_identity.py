"""Tests of the identity that a rank reads from the environment variables of launchers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchlens_perf.run import directory, identity, processes
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
    def claim(digest: str, origin: int, *, proposal: str = "", member: int | None = None) -> str:
        return proposal or f"claimed-{digest}"

    return identity.detect_identity(environ, claim, nth_watch)


def test_torchrun_variables_give_rank_node_and_attempt() -> None:
    found = detect(TORCHRUN)

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (5, 1, 8, 4)
    assert (found.attempt, found.elastic, found.pid) == (2, True, os.getpid())
    assert found.attributes["torch.elastic.max_restarts"] == "3"


def test_srun_variables_give_rank_and_node() -> None:
    """Slurm's variables replace missing ones of torchrun.

    Slurm has no variable for the number of ranks per node.
    """
    found = detect(SLURM)

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (
        3,
        1,
        4,
        None,
    )
    assert (found.on_one_node, found.run_id) == (None, "slurm-991.0")
    assert (
        found.attributes.items()
        >= {
            "slurm.job.id": "991",
            "slurm.step.id": "0",
            "slurm.job.name": "pretrain",
        }.items()
    )


def test_process_without_a_launcher_is_the_only_rank() -> None:
    found = detect({})

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (0, 0, 1, 1)
    assert (found.attempt, found.elastic) == (0, False)


@pytest.mark.parametrize(
    "text", ["first", "-2", "", " ", "²", "٣", "1e3", "0x1", "9" * 10, "9" * 5000, "\udcff"]
)
@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]
)
def test_malformed_rank_and_size_variables_are_ignored(name: str, text: str) -> None:
    assert dataclasses.replace(detect({name: text}), run_id="") == dataclasses.replace(
        detect({}), run_id=""
    )


@pytest.mark.parametrize("port", ["", "http", "²", "9" * 5000])
def test_malformed_port_variable_gives_no_store_address(port: str) -> None:
    assert identity.job_store_address({"MASTER_ADDR": "node-a", "MASTER_PORT": port}) is None


@pytest.mark.parametrize("told", ["...", ".", ""])
def test_configured_run_id_is_cleaned_or_replaced_by_a_claimed_one(told: str) -> None:
    """If no character of the configured id is left after cleaning, a run id is claimed."""
    assert detect({"TORCHLENS_PERF_RUN_ID": told}, nth_watch=1).run_id.startswith("claimed-")


def test_run_id_on_one_node_is_claimed_for_the_launcher() -> None:
    """The claim contains a digest of the launcher, which is the same for all of its children."""
    one_node = {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}
    first, second = detect({**one_node, "RANK": "0"}), detect({**one_node, "RANK": "7"})

    assert first.run_id == second.run_id
    assert first.run_id.startswith("claimed-")
    assert detect(one_node, nth_watch=2).run_id == first.run_id + "-3"
    assert detect({}).run_id != first.run_id


def test_run_id_over_several_nodes_is_shared_only_if_unique_to_the_job() -> None:
    """A usable name is known on all nodes and unique to the job. Without a usable name, each node
    claims its own run id.
    """
    c10d = {
        **TORCHRUN, "TORCHELASTIC_RUN_ID": "job/7 a", "MASTER_ADDR": "node-a", "MASTER_PORT": "42901",
        "PET_RDZV_BACKEND": "c10d",
    }  # fmt: skip

    assert detect(c10d).run_id == detect({**c10d, "RANK": "0"}).run_id
    assert detect(c10d).run_id.startswith("job_7_a-")
    assert detect({**c10d, "MASTER_PORT": "42902"}).run_id != detect(c10d).run_id
    # Users write a static rendezvous address themselves, so the next job may have the same one.
    assert detect({**c10d, "PET_RDZV_BACKEND": "static"}).run_id.startswith("claimed-")
    assert detect(TORCHRUN).run_id.startswith("claimed-")
    assert detect({"TORCHLENS_PERF_RUN_ID": "../mine"}).run_id == "_mine"


def test_start_time_is_missing_for_ended_and_zombie_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = processes.process_start_ticks(child.pid)

    assert started is not None
    assert started >= processes.process_start_ticks(os.getpid())
    child.kill()
    # Wait for the end without reaping the process.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.process_start_ticks(child.pid) is None
    child.wait()
    assert processes.process_start_ticks(child.pid) is None


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace shared memory with a folder of the test."""
    monkeypatch.setattr(directory, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_ranks_of_a_launcher_claim_the_same_run_id(local: Path) -> None:
    """The ranks of another launcher claim another run id."""
    launcher = os.getppid()
    first = claim_run_id("abc", launcher)

    assert first.startswith(time.strftime("%Y%m%d-"))
    assert claim_run_id("abc", launcher) == first
    assert claim_run_id("def", launcher).endswith("-def")


def test_single_process_leaves_no_claim_file(local: Path) -> None:
    assert claim_run_id("abc", os.getpid()).endswith("-abc")
    assert list(local.iterdir()) == []


def test_claims_of_dead_launchers_are_removed(local: Path) -> None:
    """Claims of live launchers stay.

    Claims of other namespaces stay too, because their process ids mean nothing here.
    """
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claim_run_id("dead", child.pid)
    claim_run_id("alive", os.getppid())
    folder = next(directory.create_local_folders(""))
    (folder / ".run-1-elsewhere.0").symlink_to(f"{child.pid}-5:x")
    child.kill()
    child.wait()
    claim_run_id("new", os.getppid())

    assert sorted(path.name.rpartition("-")[2] for path in folder.iterdir()) == [
        "alive.0",
        "elsewhere.0",
        "new.0",
    ]


def test_launcher_that_starts_the_same_ranks_again_makes_a_second_run(local: Path) -> None:
    """Ranks of one run claim the same id, even if one of them has ended."""
    launcher = os.getppid()

    def run_ids(*ranks: int) -> set[str]:
        program = (
            "import sys; from pathlib import Path; from torchlens_perf.run import"
            " directory\ndirectory._SHARED_MEMORY ="
            " Path(sys.argv[1])\nprint(directory.claim_run_id('abc', int(sys.argv[2]),"
            " proposal=sys.argv[4], member=int(sys.argv[3])))\nsys.stdout.flush(); input()"
        )
        children = []
        for rank in ranks:
            command = [
                sys.executable,
                "-c",
                program,
                str(local),
                str(launcher),
                str(rank),
                f"of-{rank}-in-{len(ranks)}",
            ]
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            children.append((child, child.stdout.readline()))
        for child, _ in children:
            child.communicate("end\n")
        return {claimed for _, claimed in children}

    assert run_ids(0, 1) == {"of-0-in-2\n"}
    # Rank 1 is started again.
    assert run_ids(1, 0) == {"of-1-in-2\n"}
    # Rank 2 is new, and all other ranks have ended.
    assert run_ids(2, 0, 1) == {"of-2-in-3\n"}


def test_simultaneous_claims_agree_on_one_run_id(local: Path) -> None:
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


def test_pod_name_becomes_an_attribute_in_kubernetes() -> None:
    """No configuration is needed for the pod's name."""
    found = detect(
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0", "K8S_NAMESPACE": "ml"}
    )

    assert found.attributes == {"k8s.pod.name": "train-0", "k8s.namespace.name": "ml"}


HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL_MPI = {**HYDRA, "I_MPI_HYDRA_UUID": "7c630000-844b-7c85-fc60-060054e26426"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "182255617",
}  # fmt: skip
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "3,1",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "node-a", "MASTER_PORT": "29500",
}  # fmt: skip
RAY = {
    "RAY_JOB_ID": "01000000", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "35001",
}  # fmt: skip
PYTORCHJOB = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("environ", "launcher", "local_rank", "local_world_size", "run_id"),
    [
        (HYDRA, "Hydra", 1, 2, "claimed-"),
        (INTEL_MPI, "Intel MPI", 1, 2, "mpi-"),
        (OPEN_MPI, "Open MPI", 1, 2, "mpi-"),
        (STEP, "srun", 0, 1, "slurm-7.2"),
        (DEEPSPEED, "DeepSpeed", 1, 2, "claimed-"),
        (RAY, "Ray Train", 1, 2, "claimed-"),
        (PYTORCHJOB, "environment", None, None, "claimed-"),
    ],
)
def test_launcher_variables_give_the_position_of_a_rank(
    environ: dict[str, str],
    launcher: str,
    local_rank: int | None,
    local_world_size: int | None,
    run_id: str,
) -> None:
    """The tested variables belong to the last of four ranks on two nodes."""
    found = detect(environ)
    assert (found.rank, found.world_size, found.launcher) == (3, 4, launcher)
    assert (found.local_rank, found.local_world_size) == (local_rank, local_world_size)
    assert found.run_id.startswith(run_id)
    assert found.on_one_node is not True


@pytest.mark.parametrize(
    "around",
    [
        STEP,
        {name: value for name, value in STEP.items() if "STEP" not in name},
        OPEN_MPI,
        HYDRA,
        INTEL_MPI,
    ],
)
def test_inner_launcher_is_used_if_launchers_are_nested(around: dict[str, str]) -> None:
    """Launcher variables are used only if they describe this process.

    Nested launchers are torchrun under srun or mpirun, and torchrun in a batch script.
    """
    inside = {
        **TORCHRUN,
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
    }
    assert detect({**around, **inside}).launcher == "torchrun"
    loop = detect({**around, "RANK": "1", "WORLD_SIZE": "2"})
    assert (loop.rank, loop.world_size, loop.launcher) == (1, 2, "environment")


def test_batch_script_is_a_single_process() -> None:
    """Slurm sets SLURM_PROCID=0 and the job's SLURM_NTASKS in a batch script."""
    batch = {
        name: value for name, value in {**STEP, "SLURM_PROCID": "0"}.items() if "STEP" not in name
    }
    assert (detect(batch).rank, detect(batch).world_size) == (0, 1)


@pytest.mark.parametrize(
    ("per_node", "node", "ranks"),
    [
        ("2(x3),1", "3", 1),
        ("2(x3),1", "0", 2),
        ("4", "0", 4),
        ("x", "0", None),
        ("2(x3),1", "9", None),
        ("2(x2)", "", 2),
    ],
)
def test_ranks_per_node_are_read_from_slurms_list(
    per_node: str, node: str, ranks: int | None
) -> None:
    """Slurm lists ranks per node in a compressed form such as "2(x3),1"."""
    step = {**STEP, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node, "SLURM_STEP_NUM_TASKS": "7",
            "SLURM_STEP_NUM_NODES": "4"}  # fmt: skip
    assert detect(step).local_world_size == ranks


def test_run_id_is_kept_after_a_restart_in_a_smaller_world(local: Path) -> None:
    """The port of torchrun's agent changes, and finally only one node is left."""
    before = {
        **TORCHRUN, "TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "a", "MASTER_PORT": "1", "PET_RDZV_BACKEND": "c10d",
        "GROUP_WORLD_SIZE": "2",
    }  # fmt: skip
    first = identity.detect_identity(before, claim_run_id)
    other = identity.detect_identity({**before, "MASTER_PORT": "2"}, claim_run_id)
    alone = {
        **before,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "1",
    }

    assert first.run_id.startswith("job-")
    assert other.run_id == first.run_id == identity.detect_identity(alone, claim_run_id).run_id
