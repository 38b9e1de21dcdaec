"""Where a run's files lie, seen from the training process: the run directory, and the ring files outside of it.

::

    torchlens-perf/20261121-0132-3fa9c1d2/
      nodes/HOST.json      what the node's sidecar knows: statistics, cursors, quality (report reads these)
      nodes/HOST.rings     paths of the ring files of this node, one a line
      nodes/HOST.log       what the sidecar said
      steps/HOST-*.parquet one row a step and rank
      spans/HOST-*.parquet one row a record
      oom/rankNNNNN-STEP.json, .txt  what held the memory of a device that ran out of it
      gpus/HOST-*.parquet  one row a GPU and second; links/ one row a network port and five seconds
      captures/            deep looks at a few steps, see capture_files.py
      report.txt           the last report, as rank 0 printed it

A ring file must not lie on a network disk, and on a local one the kernel's write-back would stall stores now and then:
so rings go to shared memory, or to the temporary directory where that is small.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from torchlens_perf.errors import RunStoreError
from torchlens_perf.identity import Identity
from torchlens_perf.ring import RECORD_BYTES, RECORDS_OFFSET, RingFile

_CLAIM = "run:"
_LOCK = "sidecar.lock"
_SHARED_MEMORY = Path("/dev/shm")
_SHARE_OF_FREE = 16  # a ring takes at most one part in so many: containers often have 64 MB, which DataLoaders need


class RunDirectory:
    """Paths inside one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nodes = path / "nodes"
        self.steps = path / "steps"
        self.spans = path / "spans"
        self.oom = path / "oom"
        self.captures = path / "captures"
        self.report = path / "report.txt"

    @property
    def run_id(self) -> str:
        return self.path.name

    def node_state(self, host: str) -> Path:
        return self.nodes / f"{host}.json"

    def node_rings(self, host: str) -> Path:
        return self.nodes / f"{host}.rings"

    def node_log(self, host: str) -> Path:
        return self.nodes / f"{host}.log"

    def oom_table(self, rank: int, step: int) -> Path:
        return self.oom / f"rank{rank:05d}-{step}.json"

    def create(self) -> None:
        """Makes the folders. Raises RunStoreError where that is not allowed."""
        try:
            for folder in (self.path, self.nodes, self.steps, self.spans):
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            probe = self.nodes / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RunStoreError(f"cannot write to {self.path}: {error.strerror or error}") from None

    def register_ring(self, host: str, ring: Path) -> None:
        """Tells the node's sidecar of a ring file."""
        with open(self.node_rings(host), "ab") as file:
            file.write(f"{ring}\n".encode())  # one write(2) of a short line: whole, also beside other ranks' lines

    def registered_rings(self, host: str) -> list[Path]:
        """The node's ring files so far."""
        try:
            lines = self.node_rings(host).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [Path(line.rstrip("\n")) for line in lines if line.endswith("\n")]


def claim_run_id(folder: Path, digest: str) -> str:
    """The run id for a launcher's digest: when the run began, and the digest.

    The ranks of a node ask at nearly the same time, and must hear the same: the first one leaves its answer as the
    target of a symbolic link, which can be made only once. Raises RunStoreError where `folder` cannot be written.
    """
    proposal = f"{time.strftime('%Y%m%d-%H%M%S')}-{digest}"
    claim = folder / f".run-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.symlink(f"{_CLAIM}{proposal}", claim)  # leads nowhere: it is not to be taken for the run directory
    except FileExistsError:
        return os.readlink(claim).removeprefix(_CLAIM)
    except OSError as error:
        raise RunStoreError(f"cannot write to {folder}: {error.strerror or error}") from None
    return proposal


def local_folders(run_id: str) -> Iterator[Path]:
    """This user's folders for the run's ring files and lock: on this node, not on a network disk, the best first."""
    for folder in _users_folders():
        try:
            yield _private_folder(_private_folder(folder) / run_id)
        except OSError:
            continue


def _users_folders() -> Iterator[Path]:
    for parent in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        yield parent / f"torchlens-perf-{os.getuid()}"


def find_sidecar_lock(run_id: str) -> Path | None:
    """sidecar_lock() where there is one already; makes nothing."""
    paths = (folder / run_id / _LOCK for folder in _users_folders())
    return next((path for path in paths if path.exists()), None)


def sidecar_lock(run_id: str) -> Path:
    """The file that the node's sidecar holds locked while it lives. Raises RunStoreError if no place has it."""
    for folder in local_folders(run_id):
        return folder / _LOCK
    raise RunStoreError(f"neither {_SHARED_MEMORY} nor {tempfile.gettempdir()} can be written")


def _private_folder(path: Path) -> Path:
    """Makes a folder that only this user can enter; refuses one that somebody else has put there."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError(f"{path} is not this user's own folder") from None
    return path


def create_ring(
    run: RunDirectory, identity: Identity, capacity: int, *, first_step: int = 0, keep: bool = False
) -> RingFile:
    """Makes this rank's ring file. Register it once its metadata are published: a sidecar cannot read it before.

    first_step: index of the step that recording begins with.
    keep: nobody will read it while the job runs, so it goes into the run directory.
    Raises RunStoreError if no place has room.
    """
    size = RECORDS_OFFSET + capacity * RECORD_BYTES
    problems = []
    for place in _run_folder(run) if keep else local_folders(run.run_id):
        path = place / f"{identity.key}.ring"
        try:
            if place.is_relative_to(_SHARED_MEMORY) and _free_bytes(place) < _SHARE_OF_FREE * size:
                problems.append(f"{place}: too small")
                continue
            return RingFile(path, capacity, first_step)
        except OSError as error:
            problems.append(f"{place}: {error.strerror or error}")
    raise RunStoreError(f"no place for a ring file of {size} bytes: {'; '.join(problems)}")


def _run_folder(run: RunDirectory) -> Iterator[Path]:
    folder = run.path / "rings"
    folder.mkdir(mode=0o700, exist_ok=True)
    yield folder


def _free_bytes(place: Path) -> int:
    free = os.statvfs(place)
    return free.f_bavail * free.f_frsize
