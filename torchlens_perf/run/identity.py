"""Who this process is: rank, node, launcher, scheduler. Read from the environment and torch.distributed; no network."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TypedDict

from torchlens_perf.run import location
from torchlens_perf.run.processes import process_started, text_of

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
# sys.argv[0] where the code comes from the command line, from stdin or from the keyboard.
_NO_FILE = ("", "-", "-c", "-m")
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


class ProcessGroup(TypedDict):
    """A process group that a rank has used, as it publishes it in its ring file; so are the next two."""

    ranks: str
    """Its members, as "0-7"."""
    description: str


class Gpu(TypedDict):
    """A GPU that a process computes on."""

    uuid: str
    """As NVML writes it."""
    name: str
    index: int
    """Torch's, within the process."""


class DeviceClock(TypedDict, total=False):
    """How good the device's times are, and how many are missing for what reason; empty without any."""

    clock: str
    error_ns: int | None
    captured: int
    skipped: int
    unread: int


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
        run_id=_configured_run_id(environ, world_size > local_world_size, again)
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
    found.update(location.attributes(environ))
    if "KUBERNETES_SERVICE_HOST" in environ:
        found.setdefault("k8s.pod.name", environ.get("HOSTNAME", socket.gethostname()))
        namespace = text_of(_KUBERNETES_NAMESPACE)
        if namespace:  # else the pod runs without a service account
            found.setdefault("k8s.namespace.name", namespace)
    return found


def _configured_run_id(environ: Mapping[str, str], several_nodes: bool, again: str) -> str | None:
    """The run id that the user, or over several nodes the launcher or scheduler, set for all ranks; None if unset."""
    configured = environ.get("TORCHLENS_PERF_RUN_ID")
    if not configured and several_nodes:
        elastic, slurm = environ.get("TORCHELASTIC_RUN_ID", "none"), environ.get("SLURM_JOB_ID")
        if elastic != "none":
            configured = elastic
        elif slurm:
            configured = f"slurm-{slurm}.{environ.get('SLURM_STEP_ID', '0')}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", configured or "").strip(".")[:80]
    return name + again if name else None


def _launcher_digest(origin: int) -> str:
    """Names the process that started the ranks: the same on all ranks of a node and over elastic restarts."""
    text = f"{socket.gethostname()}/{origin}/{process_started(origin)}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def program_name(environ: Mapping[str, str]) -> str:
    """The program of this process: `train.py`, `package.module`, `train.ipynb` or `python`; no folder, no arguments."""
    return name_of(getattr(sys, "argv", []), sys.modules.get("__main__"), environ)


def name_of(arguments: Sequence[str], main: ModuleType | None, environ: Mapping[str, str]) -> str:
    """The program's name, from sys.argv, the module `__main__` and the environment.

    A script, folder or zip file: its name. `-m`: the module's. A notebook's kernel: the notebook's, or `notebook`
    where nobody says which. Code from the command line, stdin or the keyboard: `python`.
    """
    started = str(arguments[0]) if arguments else ""
    if started in _NO_FILE:
        return "python"
    spec = getattr(main, "__spec__", None)
    # What runs a script inside its own __main__, as cProfile does, has a spec too, but of another file.
    module = getattr(spec, "name", None) if getattr(spec, "origin", None) == started else None
    name = module.removesuffix(".__main__") if module else _file_name(started)
    # ipykernel_launcher.py, those of Colab and Databricks, and `python -m ipykernel`.
    if name.removesuffix(".py").endswith("kernel_launcher") or name == "ipykernel":
        return _notebook(main, environ)
    return name


def _file_name(path: str) -> str:
    """The last part of a path that says something; as text that can be exported, whatever bytes it has."""
    name = os.path.basename(path)
    if name in ("", ".", "..", "__main__.py"):
        try:
            path = os.path.realpath(path)
        except OSError:  # the working directory is gone
            return "python"
        name = os.path.basename(os.path.dirname(path) if name == "__main__.py" else path)
    return os.fsencode(name).decode(errors="replace") or "python"


def _notebook(main: ModuleType | None, environ: Mapping[str, str]) -> str:
    # VS Code sets the one among the notebook's names; Jupyter Server the other, for the kernel that it starts.
    for path in (getattr(main, "__vsc_ipynb_file__", None), environ.get("JPY_SESSION_NAME")):
        if isinstance(path, str) and path.endswith(".ipynb"):
            return _file_name(path)
    return "notebook"
