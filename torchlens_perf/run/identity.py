"""Detect the identity of this process: rank, node, launcher and scheduler.

The sources are the environment and torch.distributed. No network requests are made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType

from torchlens_perf.interruption import ours
from torchlens_perf.run import location
from torchlens_perf.run.place import launcher
from torchlens_perf.run.place.caller import read_calling_span
from torchlens_perf.run.place.launcher import JobPlace, is_number
from torchlens_perf.run.place.node import node_name
from torchlens_perf.run.processes import process_start_ticks, read_command_line, read_kernel_text

# Resource attributes of a rank that have no OpenTelemetry name.
RUN_ID = "torch.run.id"
RANK = "torch.distributed.rank"
LOCAL_RANK = "torch.distributed.local_rank"
WORLD_SIZE = "torch.distributed.world_size"
RESTART_COUNT = "torch.elastic.restart_count"
# Names of rank, local rank and world size in NeMo Lens (nemo/lens/semconv/attributes.py).
LENS_RANK = "nv.dl.rank"
LENS_LOCAL_RANK = "nv.dl.local_rank"
LENS_WORLD_SIZE = "nv.dl.world_size"
# Attributes of the scheduler and launcher, under their exported names (exporters/semantics.py).
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
# Values of sys.argv[0] for code from the command line, from stdin or from an interactive prompt.
_NO_FILE = ("", "-", "-c", "-m")
_KUBERNETES_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def digest_module_names(module_names: Iterable[str]) -> str:
    """Return a hash of the names of watched modules. Only ranks with equal hashes are compared."""
    return hashlib.sha256("\0".join(sorted(module_names)).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identity of a process: one rank of one attempt of a run."""

    run_id: str
    rank: int
    local_rank: int | None  # None if the launcher does not provide it
    world_size: int
    local_world_size: int | None  # number of ranks on its node; None if not provided
    # Number of restarts of the job: the launcher's count, until the sidecar has a more exact one.
    attempt: int
    host: str
    pid: int
    # Clock ticks after boot. Together with the pid this identifies a process.
    process_started: int
    launcher_pid: int
    elastic: bool
    program: str  # what the user started, such as train.py, without folder and arguments
    traceparent: str  # span that started the job, unvalidated: see place/caller.py
    attributes: dict[str, str]
    node: str = ""  # name of its node in file names, see place/node.py
    launcher: str = ""  # see place/launcher.py
    watch: int = 0  # number of earlier watches in its process
    # The launcher's count, which may differ between nodes; None if it equals `attempt`.
    launcher_restarts: int | None = None
    tracestate: str = ""  # tracestate that belongs to traceparent

    @property
    def restarts(self) -> int:
        """Number of restarts that the launcher of the node has counted. It may differ by node."""
        return self.attempt if self.launcher_restarts is None else self.launcher_restarts

    @property
    def has_other_ranks(self) -> bool:
        """True if the job has several ranks."""
        return self.world_size > 1

    @property
    def on_one_node(self) -> bool | None:
        """True if all ranks of the job are on one node; None if not known."""
        if self.world_size == 1:
            return True
        return None if self.local_world_size is None else self.local_world_size >= self.world_size

    @property
    def key(self) -> str:
        """Stem of the names of this process's files, which is unique on the node."""
        return f"rank{self.rank:05d}-attempt{self.restarts}-{self.pid}-{self.process_started}"


def detect_identity(
    environ: Mapping[str, str], claim: Callable[..., str], nth_watch: int = 0
) -> Identity:
    """Return the current identity of this process.

    If torch.distributed is initialized, its rank and world size override the environment.

    claim: directory.claim_run_id(). nth_watch: number of earlier watches in this process, which is
    appended to the run id.
    """
    place = launcher.detect_place(
        environ, _torch_rank_and_world_size(), read_command_line(os.getppid())
    )
    pid, host = os.getpid(), socket.gethostname()
    traceparent, tracestate = read_calling_span(environ)
    suffix = f"-{nth_watch + 1}" if nth_watch else ""
    return Identity(
        run_id=_determine_run_id(environ, place, claim, suffix),
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        attempt=place.attempt,
        host=host,
        pid=pid,
        process_started=process_start_ticks(pid) or 0,
        launcher_pid=os.getppid(),
        elastic=place.elastic,
        program=derive_program_name(getattr(sys, "argv", []), sys.modules.get("__main__"), environ),
        traceparent=traceparent,
        attributes=collect_job_attributes(environ),
        node=node_name(host),
        launcher=place.launcher,
        watch=nth_watch,
        launcher_restarts=place.attempt,
        tracestate=tracestate,
    )


def job_store_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the job's TCPStore; None if they are not set.

    The variables are those of torch.distributed's env:// method.
    """
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and is_number(port) else None


def _torch_rank_and_world_size() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def collect_job_attributes(environ: Mapping[str, str]) -> dict[str, str]:
    """Return attributes of scheduler, launcher, container and cloud by their exported names."""
    found = {
        name: environ[variable] for name, variable in _ATTRIBUTES.items() if environ.get(variable)
    }
    found.update(location.detect_location_attributes(environ))
    if "KUBERNETES_SERVICE_HOST" in environ:
        found.setdefault("k8s.pod.name", environ.get("HOSTNAME", socket.gethostname()))
        namespace = read_kernel_text(_KUBERNETES_NAMESPACE)
        # The file is missing if the pod runs without a service account.
        if namespace:
            found.setdefault("k8s.namespace.name", namespace)
    # Bytes of an environment value that are invalid UTF-8 could not be exported.
    return {
        name: value.encode(errors="surrogateescape").decode(errors="replace")
        for name, value in found.items()
    }


def run_id_from_environment(environ: Mapping[str, str], place: JobPlace) -> str:
    """Return the run id that the environment defines for a process's first watch; "" if none."""
    job = "" if place.elastic or place.nodes == 1 or place.world_size == 1 else place.job
    return _to_folder_name(environ.get("TORCHLENS_PERF_RUN_ID", "")) or _to_folder_name(job)


def _determine_run_id(
    environ: Mapping[str, str], place: JobPlace, claim: Callable[..., str], suffix: str
) -> str:
    """Return the run id, which the user, the job or the ranks of this node define.

    If the environment contains no unique name of this job, the ranks of each node agree on an id.
    Node 0's sidecar then sends its id to the other nodes (sidecar/nodes/membership.py).
    """
    defined = run_id_from_environment(environ, place)
    if defined:
        return defined + suffix
    if place.world_size == 1 and not place.elastic:
        return claim(_launcher_digest(os.getpid()) + suffix, os.getpid())
    origin = os.getppid()
    job = "" if place.nodes == 1 else _to_folder_name(place.job)
    if place.elastic and (job or place.nodes == 1):
        # A restart has another port and maybe another world size. The agent process stays the same.
        return claim(_launcher_digest(origin) + suffix, origin, proposal=job and job + suffix)
    digest = launcher.hash_texts(place.facts) if place.facts else _launcher_digest(origin)
    # Even a launcher without restarts may start the same rank again, for example a shell loop or a
    # script that spawns twice.
    return claim(digest + suffix, origin, member=None if place.elastic else place.rank)


def _to_folder_name(text: str) -> str:
    """Convert a text to a valid folder name; "" if no valid character remains."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip(".")[:80]


def _launcher_digest(origin: int) -> str:
    """Return a hash of the process that started the ranks.

    The hash is equal on all ranks of a node and stays the same over elastic restarts.
    """
    return launcher.hash_texts(f"{socket.gethostname()}/{origin}/{process_start_ticks(origin)}")


def derive_program_name(
    arguments: Sequence[str], main: ModuleType | None, environ: Mapping[str, str]
) -> str:
    """Derive a program's name from sys.argv, the module `__main__` and the environment.

    Examples: `train.py`, `package.module`, `train.ipynb`, `python`.

    - A script, folder or zip file: its name.
    - `python -m`: the name of the module.
    - A notebook's kernel: the name of the notebook, or `notebook` if it is not known.
    - Code from the command line, stdin or an interactive prompt: `python`.
    """
    started = str(arguments[0]) if arguments else ""
    if started in _NO_FILE:
        return "python"
    spec = getattr(main, "__spec__", None)
    # With cProfile and similar tools, the spec of __main__ is the tool's and not the script's.
    module = getattr(spec, "name", None) if getattr(spec, "origin", None) == started else None
    name = module.removesuffix(".__main__") if module else _last_path_part(started)
    # Matches ipykernel_launcher.py, the launchers of Colab and Databricks, `python -m ipykernel`.
    if name.removesuffix(".py").endswith("kernel_launcher") or name == "ipykernel":
        return _notebook_name(main, environ)
    return name


def _last_path_part(path: str) -> str:
    """Return the last part of a path that is not `.`, `..` or `__main__.py`.

    Bytes that are invalid UTF-8 are replaced.
    """
    name = os.path.basename(path)
    if name in ("", ".", "..", "__main__.py"):
        try:
            path = os.path.realpath(path)
        except ours(OSError):
            # realpath() fails if the working directory has been removed.
            return "python"
        name = os.path.basename(os.path.dirname(path) if name == "__main__.py" else path)
    return os.fsencode(name).decode(errors="replace") or "python"


def _notebook_name(main: ModuleType | None, environ: Mapping[str, str]) -> str:
    # VS Code defines the variable in the notebook's namespace. Jupyter Server sets the environment
    # variable for its kernels.
    for path in (getattr(main, "__vsc_ipynb_file__", None), environ.get("JPY_SESSION_NAME")):
        if isinstance(path, str) and path.endswith(".ipynb"):
            return _last_path_part(path)
    return "notebook"
