"""Who this process is: rank, node, launcher, scheduler. Read from the environment and torch.distributed; no network."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchlens_perf import site
from torchlens_perf.processes import process_started
from torchlens_perf.program import program_name

# Facts of the scheduler and launcher, under the names that they are exported with (exporters/semantics.py).
_ATTRIBUTES = {
    "torch.elastic.run_id": "TORCHELASTIC_RUN_ID",
    "torch.elastic.max_restarts": "TORCHELASTIC_MAX_RESTARTS",
    "slurm.job.id": "SLURM_JOB_ID",
    "slurm.job.name": "SLURM_JOB_NAME",
    "slurm.step.id": "SLURM_STEP_ID",
    "slurm.node.name": "SLURMD_NODENAME",
    "slurm.cluster.name": "SLURM_CLUSTER_NAME",
    "slurm.job.partition": "SLURM_JOB_PARTITION",
    "k8s.pod.name": "K8S_POD_NAME",
    "k8s.pod.uid": "K8S_POD_UID",
    "k8s.namespace.name": "K8S_NAMESPACE",
    "k8s.node.name": "K8S_NODE_NAME",
    "k8s.job.name": "K8S_JOB_NAME",
}
_MAX_DIGITS = 9  # of a launcher's number: a longer one is none
_KUBERNETES_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def model_digest(module_names: Iterable[str]) -> str:
    """Short text for what a rank computes, from the names of its watched modules: the same on ranks that compare."""
    return hashlib.sha256("\0".join(sorted(module_names)).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Identity:
    """One rank of one attempt of a run."""

    run_id: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    attempt: int
    host: str
    pid: int
    process_started: int  # clock ticks after boot: with the pid, names a process for good
    launcher_pid: int
    elastic: bool
    program: str  # what the user started, such as train.py: no folder, no arguments
    traceparent: str
    attributes: dict[str, str]

    @property
    def key(self) -> str:
        """Names this process's files: unique on the node and over attempts."""
        return f"rank{self.rank:05d}-attempt{self.attempt}-{self.pid}-{self.process_started}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def detect(environ: Mapping[str, str], claim: Callable[[str, int], str], nth_watch: int = 0) -> Identity:
    """The identity of this process now. torch.distributed, once initialised, overrules the environment.

    claim: turns the launcher's digest, the same on all ranks of a node, and its pid into a run id
    (run_directory.claim_run_id).
    nth_watch: how many watches this process ran before; each run needs a folder of its own.
    """
    rank, world_size = _distributed()
    if world_size is None:
        rank = _integer(environ, "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", default=0)
        world_size = _integer(environ, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", default=1)
    local_rank = _integer(environ, "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", default=rank)
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", default=world_size)
    pid = os.getpid()
    origin = os.getppid() if world_size > 1 else pid
    again = f"-{nth_watch + 1}" if nth_watch else ""
    return Identity(
        run_id=_told_run_id(environ, world_size > local_world_size, again)
        or claim(_launcher_digest(origin) + again, origin),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", default=0),
        host=socket.gethostname(),
        pid=pid,
        process_started=process_started(pid) or 0,
        launcher_pid=os.getppid(),
        elastic="TORCHELASTIC_RUN_ID" in environ,
        program=program_name(environ),
        traceparent=environ.get("TRACEPARENT", ""),
        attributes=_attributes(environ),
    )


def job_store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where the job's TCPStore is, as torch.distributed's env:// reads it; None where nobody said."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and _is_number(port) else None


def _distributed() -> tuple[int, int] | tuple[int, None]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, None
    return distributed.get_rank(), distributed.get_world_size()


def _integer(environ: Mapping[str, str], *names: str, default: int) -> int:
    for name in names:
        if _is_number(environ.get(name, "")):
            return int(environ[name])
    return default


def _is_number(text: str) -> bool:
    """str.isdigit() alone is true of "²", which int() refuses."""
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def _attributes(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: environ[variable] for name, variable in _ATTRIBUTES.items() if environ.get(variable)}
    found.update(site.attributes(environ))
    if "KUBERNETES_SERVICE_HOST" in environ:
        found.setdefault("k8s.pod.name", environ.get("HOSTNAME", socket.gethostname()))
        try:
            with open(_KUBERNETES_NAMESPACE, errors="replace") as file:
                found.setdefault("k8s.namespace.name", file.read().strip())
        except OSError:
            pass  # the pod runs without a service account: its namespace is not told
    return found


def _told_run_id(environ: Mapping[str, str], several_nodes: bool, again: str) -> str | None:
    """The run id that the user, or over several nodes the launcher or scheduler, told all ranks; None if nobody did."""
    told = environ.get("TORCHLENS_PERF_RUN_ID")
    if not told and several_nodes:
        elastic, slurm = environ.get("TORCHELASTIC_RUN_ID", "none"), environ.get("SLURM_JOB_ID")
        if elastic != "none":
            told = elastic
        elif slurm:
            told = f"slurm-{slurm}.{environ.get('SLURM_STEP_ID', '0')}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", told or "").strip(".")[:80]
    return name + again if name else None


def _launcher_digest(origin: int) -> str:
    """Names the process that started the ranks: the same on all ranks of a node and over elastic restarts."""
    text = f"{socket.gethostname()}/{origin}/{process_started(origin)}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
