"""Read rank, job name and restarts from the environment variables of each launcher.

A row of LAUNCHERS applies if its variables are set and agree with torch's rank and world size. The
variables alone do not prove which launcher started the process. Slurm also sets SLURM_PROCID in
batch scripts, and processes of torchrun under srun inherit the SLURM_PROCID of their agent.

Values that the row does not provide are None. Other modules derive missing values from the ranks
that appear on a node. docs/guides/launchers.md lists the source of each row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A longer number in a launcher's variable is invalid.
_MAX_DIGITS = 9
# Patterns are compiled when they are used, which few programs do.
_BACKEND = r"--rdzv[-_]backend(?:=(.*))?"
_STORE = ("MASTER_ADDR", "MASTER_PORT")
# Format of SLURM_TASKS_PER_NODE, srun(1): "2(x3),1".
_PER_NODE = r"(\d+)(?:\(x(\d+)\))?"


class LauncherVariables(NamedTuple):
    """Variables that a launcher sets. Of several in a field, the first one that is set is used."""

    name: str
    marks: tuple[str, ...]
    """Variables that identify the launcher if all of them are set. Earlier rows take precedence."""
    rank: str = "RANK"
    world_size: tuple[str, ...] = ("WORLD_SIZE",)
    local_rank: str = "LOCAL_RANK"
    local_world_size: str = ""
    node: tuple[str, ...] = ()
    """Index of the node."""
    nodes: tuple[str, ...] = ()
    """Number of nodes."""
    per_node: tuple[str, ...] = ()
    """Number of ranks on each node, in Slurm's format."""
    restarts: str = ""
    job: tuple[str, ...] = ()
    """Variables whose values together identify the job on all nodes and differ for every job."""


LAUNCHERS = (
    # torch/distributed/elastic/agent/server/local_elastic_agent.py; Accelerate also starts it. Each
    # agent counts its own restarts. After a failure, the agent of the failed node has counted 1
    # restart and other agents 0.
    LauncherVariables(
        "torchrun",
        ("TORCHELASTIC_RUN_ID",),
        local_world_size="LOCAL_WORLD_SIZE",
        node=("GROUP_RANK",),
        nodes=("GROUP_WORLD_SIZE",),
        restarts="TORCHELASTIC_RESTART_COUNT",
    ),
    # ray/train/torch/config.py
    LauncherVariables(
        "Ray Train",
        ("RAY_JOB_ID", "NODE_RANK"),
        local_world_size="LOCAL_WORLD_SIZE",
        node=("NODE_RANK",),
    ),
    # deepspeed/launcher/launch.py
    LauncherVariables(
        "DeepSpeed",
        ("CROSS_RANK", "CROSS_SIZE"),
        local_world_size="LOCAL_SIZE",
        node=("CROSS_RANK",),
        nodes=("CROSS_SIZE",),
    ),
    # srun(1), OUTPUT ENVIRONMENT VARIABLES. A batch script has SLURM_PROCID but no SLURM_STEP_ID.
    LauncherVariables(
        "srun",
        ("SLURM_PROCID", "SLURM_STEP_ID"),
        rank="SLURM_PROCID",
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        node=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        per_node=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        restarts="SLURM_RESTART_COUNT",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    # Open MPI 4 and 5: docs.open-mpi.org, "Environment variables that are set for MPI processes";
    # OpenPMIx's namespace.
    LauncherVariables(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
    ),
    # Observed with Intel MPI 2021.19: variables of Hydra, and a job name that mpiexec creates.
    LauncherVariables(
        "Intel MPI",
        ("PMI_RANK", "PMI_SIZE", "I_MPI_HYDRA_UUID"),
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        job=("I_MPI_HYDRA_UUID",),
    ),
    # MPICH, src/pm/hydra.
    LauncherVariables(
        "Hydra",
        ("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
    # lightning/fabric/strategies/launchers/subprocess_script.py sets no RANK. torch.distributed
    # provides the rank.
    LauncherVariables(
        "Lightning", ("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"), node=("NODE_RANK",)
    ),
    # Only torch's env:// variables are set, for example by a shell loop, a JobSet, or Kubeflow's
    # PyTorchJob with one process per pod.
    LauncherVariables(
        "environment",
        ("RANK", "WORLD_SIZE"),
        local_world_size="LOCAL_WORLD_SIZE",
        node=("NODE_RANK",),
    ),
)
_ALONE = LauncherVariables("", ())


class JobPlace(NamedTuple):
    """Rank of one process in its job, and its launcher. Unknown values are None."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    nodes: int | None
    attempt: int
    """Number of restarts, counted by the launcher of this node."""
    elastic: bool
    """True if the launcher may restart its processes."""
    job: str
    """Name that is equal on all nodes and differs for every job; "" if the job has no such name."""
    facts: str
    """Values that are equal on all ranks but may be the same in a later job; "" if not known."""


def detect_place(
    environ: Mapping[str, str], distributed: tuple[int, int] | None, parent: Sequence[str] = ()
) -> JobPlace:
    """Detect the rank of this process, its job and its launcher.

    distributed: rank and world size of torch.distributed if it is initialized. They override the
    environment. parent: command line of the parent process.
    """
    row, rank, world_size = _choose_launcher(environ, distributed)
    local_rank = _first_number(environ, row.local_rank)
    local_world_size = _first_number(environ, row.local_world_size)
    if local_world_size is None:
        local_world_size = _ranks_on_node(
            next((environ[name] for name in row.per_node if environ.get(name)), ""),
            _first_number(environ, *row.node),
        )
    nodes = _first_number(environ, *row.nodes)
    if world_size == 1 or nodes == 1:
        local_rank = rank if local_rank is None else local_rank
        local_world_size = world_size
    if local_world_size is not None and not 0 < local_world_size <= world_size:
        local_world_size = None
    if local_world_size == world_size:
        nodes = 1
    known = [environ.get(name, "") for name in (*_STORE, "TORCHELASTIC_RUN_ID")]
    return JobPlace(
        launcher=row.name,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        nodes=nodes,
        attempt=_first_number(environ, row.restarts) or 0,
        elastic=row.name == "torchrun",
        job=_job_name(environ, row, parent),
        facts="\n".join([*known, str(world_size)]) if known[1] else "",
    )


def _choose_launcher(
    environ: Mapping[str, str], distributed: tuple[int, int] | None
) -> tuple[LauncherVariables, int, int]:
    """Return the launcher that started this process, and the process's rank and world size."""
    known = distributed or _read_rank_and_world_size(environ, "RANK", ("WORLD_SIZE",))
    for row in LAUNCHERS:
        if all(environ.get(mark) for mark in row.marks):
            own = _read_rank_and_world_size(environ, row.rank, row.world_size)
            if own is not None and (known is None or own == known):
                return row, *own
            if (
                known is not None
                and row.name == "Lightning"
                and _first_number(environ, "WORLD_SIZE") == known[1]
            ):
                return row, *known
    if known is not None:
        return _ALONE, *known
    # Some of torch's variables are missing. Assume a job of one process.
    return _ALONE, _first_number(environ, "RANK") or 0, _first_number(environ, "WORLD_SIZE") or 1


def _job_name(environ: Mapping[str, str], row: LauncherVariables, parent: Sequence[str]) -> str:
    if row.name == "torchrun":
        elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
        store = [environ.get(name, "") for name in _STORE]
        # With c10d, node 0 has chosen a free port for this job and sent it to other nodes. Without
        # c10d, the user configures id and port, so the next job may have the same values.
        if elastic == "none" or not all(store) or _rendezvous_backend(environ, parent) != "c10d":
            return ""
        return f"{elastic[:60]}-{hash_texts(elastic, *store)}"
    values = [environ.get(name, "") for name in row.job]
    if not values or not all(values):
        return ""
    return f"slurm-{'.'.join(values)}" if row.name == "srun" else f"mpi-{hash_texts(*values)}"


def _rendezvous_backend(environ: Mapping[str, str], parent: Sequence[str]) -> str:
    """Return the rendezvous backend in torchrun's arguments or variables; "" if it is not set."""
    for name, following in zip(parent, [*parent[1:], ""], strict=True):
        found = re.fullmatch(_BACKEND, name)
        if found:
            return found[1] or following
    return environ.get("PET_RDZV_BACKEND", "")


def hash_texts(*texts: str) -> str:
    """Return a short hash for names of jobs and launchers."""
    return hashlib.sha256("\n".join(texts).encode(errors="surrogateescape")).hexdigest()[:8]


def _ranks_on_node(per_node: str, node: int | None) -> int | None:
    """Return the number of ranks on a node; None if not known. per_node: Slurm's list of counts."""
    counts: list[int] = []
    for part in filter(None, per_node.split(",")):
        found = re.fullmatch(_PER_NODE, part)
        if found is None or len(counts) > 1 << 20:
            return None
        counts += [int(found[1][:_MAX_DIGITS])] * min(int((found[2] or "1")[:_MAX_DIGITS]), 1 << 20)
    if node is not None and node < len(counts):
        return counts[node]
    return counts[0] if len(set(counts)) == 1 else None


def _read_rank_and_world_size(
    environ: Mapping[str, str], rank: str, world_size: tuple[str, ...]
) -> tuple[int, int] | None:
    found = _first_number(environ, rank), _first_number(environ, *world_size)
    return (
        (found[0], found[1])
        if found[0] is not None and found[1] is not None and found[0] < found[1]
        else None
    )


def _first_number(environ: Mapping[str, str], *names: str) -> int | None:
    return next((int(environ[name]) for name in names if is_number(environ.get(name, ""))), None)


def is_number(text: str) -> bool:
    """Return True if int() accepts the text. str.isdigit() alone also accepts "²"."""
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
