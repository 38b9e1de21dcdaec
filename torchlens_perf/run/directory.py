"""Where a run's files lie, seen from the training process: the run directory, and what must lie on this node.

::

    torchlens-perf/20261121-0132-3fa9c1d2/
      nodes/HOST.json      what the node's sidecar knows: statistics, cursors, quality (report reads these)
      nodes/HOST.rings     paths of the ring files in rings/ of this node, one a line
      nodes/HOST.log       what the sidecar said
      steps/HOST-*.parquet one row a step and rank
      spans/HOST-*.parquet one row a record
      oom/rankNNNNN-STEP.json, .txt  what held the memory of a device that ran out of it
      gpus/HOST-*.parquet  one row a GPU and second; links/ one row a network port and five seconds
      captures/            deep looks at a few steps, see captures.py
      rings/KEY.ring       ring files, where no sidecar reads them while the job runs
      report.txt           the last report

    /dev/shm/torchlens-perf-UID/
      .run-...             the run id that the ranks of one launcher have agreed on
      20261121-0132-3fa9c1d2/
        KEY.ring           a rank's ring file
        TIME-KEY.registered  a link to it: it can be read
        KEY.report         where rank 0 waits for its report, see report_mailbox.py
        sidecar.lock, sidecar.log  the second until the run directory is there

A ring file must not lie on a network disk, and on a local one the kernel's write-back would stall stores now and then:
so rings go to shared memory, or to the temporary directory where that is small. There the training process and the
sidecar also meet: the training process itself touches nothing in the run directory, whose disk may not answer, unless
there is no sidecar.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from torchlens_perf.errors import RunStoreError
from torchlens_perf.run import make_folders
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.processes import process_started
from torchlens_perf.run.ring import RECORD_BYTES, RECORDS_OFFSET, RingFile

_CLAIM = "run:"
_CLAIM_NAME = re.compile(r"\.(?:run|off)-(\d+)-(\d+)-(\d+)-")  # of which PID namespace, process, and its start
_REGISTERED, _MAILBOX = ".registered", ".report"
_LOCK, _LOG = "sidecar.lock", "sidecar.log"
_SHARED_MEMORY = Path("/dev/shm")
_SHARE_OF_FREE = 16  # a ring takes at most one part in so many: containers often have 64 MB, which DataLoaders need
_MAX_TRIES = 5  # in a folder that a sidecar which ends may just then remove

_T = TypeVar("_T")


class RunDirectory:
    """Paths inside one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nodes = path / "nodes"
        self.steps = path / "steps"
        self.spans = path / "spans"
        self.oom = path / "oom"
        self.captures = path / "captures"
        self.rings = path / "rings"
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

    @property
    def folders(self) -> list[Path]:
        """That must be there."""
        return [self.steps, self.spans, self.nodes]

    def create(self) -> list[str]:
        """Makes the folders; returns those that were missing. Raises RunStoreError where that is not allowed."""
        try:
            return make_folders.make([str(folder) for folder in self.folders])
        except OSError as error:
            raise RunStoreError(f"cannot write to {self.path}: {error.strerror or error}") from None

    def register_ring(self, host: str, ring: Path) -> None:
        """Tells the node's sidecar of a ring file that can be read. Raises OSError or RunStoreError."""
        if not ring.is_relative_to(self.path):
            # Sidecars take them in the order of their names, which is that of time.
            link = f"{time.monotonic_ns():020d}-{ring.stem}{_REGISTERED}"
            _in_local_folder(self.run_id, lambda folder: os.symlink(ring, folder / link))
            return
        with open(self.node_rings(host), "ab", buffering=0) as file:
            try:
                file.write(f"{ring}\n".encode())  # one write(2) of a short line: whole, also beside other ranks' lines
            except OSError:
                if not file.tell():
                    self.node_rings(host).unlink()
                raise

    def registered_rings(self, host: str) -> list[Path]:
        """The node's ring files so far, in the order of their registration."""
        return self.kept_rings(host) + self.local_rings()

    def kept_rings(self, host: str) -> list[Path]:
        """Those in the run directory."""
        try:
            lines = self.node_rings(host).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [Path(line.rstrip("\n")) for line in lines if line.endswith("\n")]

    def local_rings(self) -> list[Path]:
        """Those outside of the run directory: to know them, its disk is not asked."""
        return [Path(os.readlink(link)) for link in sorted(self._local_files(f"*{_REGISTERED}"))]

    def local_changes_ns(self) -> list[int]:
        """When something last came or went, in each folder that local_rings() looks at; 0 where there is none."""
        return [_changed_ns(parent / self.run_id) for parent in _local_parents()]

    def local_mailboxes(self) -> list[Path]:
        """Where somebody waits for the report, or has waited."""
        return list(self._local_files(f"*{_MAILBOX}"))

    def remove_ring(self, ring: Path) -> None:
        """Removes a ring file, what it was registered by, and its folder if nothing else is in it."""
        ring.unlink(missing_ok=True)
        for link in self._local_files(f"*-{ring.stem}{_REGISTERED}"):
            link.unlink(missing_ok=True)
        _remove_if_empty(ring.parent)  # else other rings, or the sidecar's lock, are there

    def leave_local(self) -> None:
        """A rank that does not record: its folders of this node go, if nobody else is in them."""
        for parent in _local_parents():
            _remove_if_empty(parent / self.run_id)

    def clear_local(self) -> None:
        """The sidecar ends: removes what nobody waits for on this node, but for its lock."""
        for path in self._local_files("*"):
            left = path.suffix == _REGISTERED and not path.exists()
            left |= path.suffix == _MAILBOX and not path.with_suffix(".ring").exists()
            if left or path.name == _LOG:
                path.unlink(missing_ok=True)

    def _local_files(self, pattern: str) -> Iterator[Path]:
        """Makes no folder."""
        for parent in _local_parents():
            folder = parent / self.run_id
            if _is_private(parent) and _is_private(folder):
                yield from list(folder.glob(pattern))


def claim_run_id(digest: str, origin: int) -> str:
    """The run id for a launcher's digest: when the run began, and the digest.

    The ranks of a node ask at nearly the same time, and must hear the same: the first one leaves its answer as the
    target of a symbolic link, which can be made only once. It is forgotten some time after the launcher has ended.
    origin: the launcher's pid; of a process that is its own, nobody else asks. Raises RunStoreError where no place of
    this node can be written.
    """
    proposal = f"{time.strftime('%Y%m%d-%H%M%S')}-{digest}"
    return proposal if origin == os.getpid() else _claimed("run", digest, origin, proposal)


def is_first(digest: str, origin: int) -> bool:
    """Whether this is the first of the launcher's ranks to ask so on this node. Raises as claim_run_id()."""
    return origin == os.getpid() or _claimed("off", digest, origin, str(os.getpid())) == str(os.getpid())


def _claimed(kind: str, digest: str, origin: int, proposal: str) -> str:
    """What the first one has proposed."""
    name = f".{kind}-{_pid_namespace()}-{origin}-{process_started(origin) or 0}-{digest}"

    def claim(folder: Path) -> str:
        _forget_claims_of_the_dead(folder)
        try:
            os.symlink(f"{_CLAIM}{proposal}", folder / name)  # leads nowhere: it is content, made and written at once
        except FileExistsError:
            return os.readlink(folder / name).removeprefix(_CLAIM)
        return proposal

    return _in_local_folder("", claim)


def _forget_claims_of_the_dead(folder: Path) -> None:
    for link in folder.glob(".*"):
        found = _CLAIM_NAME.match(link.name)
        # Another namespace's process ids say nothing here.
        if found and int(found[1]) == _pid_namespace() and process_started(int(found[2])) != int(found[3]):
            link.unlink(missing_ok=True)


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def local_folders(run_id: str) -> Iterator[Path]:
    """This user's folders for the run's ring files and lock: on this node, not on a network disk, the best first."""
    for parent in _local_parents():
        try:
            _private_folder(parent)
            yield _private_folder(parent / run_id)
        except OSError:
            continue


def _local_parents() -> Iterator[Path]:
    """Not made. The temporary directory is looked for only where shared memory does not do: looking writes to disks."""
    name = f"torchlens-perf-{os.getuid()}"
    yield _SHARED_MEMORY / name
    yield Path(tempfile.gettempdir()) / name


def _in_local_folder(run_id: str, work: Callable[[Path], _T]) -> _T:
    """Works in the best folder of this node. Raises RunStoreError where there is none, or none that can be written."""
    problem: OSError | None = None
    for _ in range(_MAX_TRIES):
        for folder in local_folders(run_id):
            try:
                return work(folder)
            except FileNotFoundError as error:
                problem = error  # the folder's, or what was read there: removed in this instant
                break
            except OSError as error:
                problem = error
    reason = f": {problem.strerror or problem}" if problem is not None else ""
    raise RunStoreError(f"neither {_SHARED_MEMORY} nor {tempfile.gettempdir()} can be written{reason}") from problem


def find_sidecar_lock(run_id: str) -> Path | None:
    """sidecar_lock() where there is one already; makes nothing."""
    paths = (parent / run_id / _LOCK for parent in _local_parents())
    return next((path for path in paths if path.exists()), None)


def sidecar_lock(run_id: str) -> Path:
    """The file that the node's sidecar holds locked while it lives. Raises RunStoreError if no place has it."""
    return _in_local_folder(run_id, lambda folder: folder / _LOCK)


def sidecar_log(lock: Path) -> Path:
    """Where a sidecar says what it has to say, until it has a run directory. lock: its sidecar_lock()."""
    return lock.with_name(_LOG)


def _changed_ns(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _private_folder(path: Path) -> Path:
    """Makes a folder that only this user can enter; refuses one that somebody else has put there."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_private(path):
            raise PermissionError(f"{path} is not this user's own folder") from None
    return path


def _is_private(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022


def create_ring(
    run: RunDirectory, identity: Identity, capacity: int, *, first_step: int = 0, keep: bool = False
) -> RingFile:
    """Makes this rank's ring file. Register it once its metadata are published: a sidecar cannot read it before.

    first_step: index of the step that recording begins with.
    keep: nobody will read it while the job runs, so it goes into the run directory.
    Raises RunStoreError if no place has room.
    """
    size = RECORDS_OFFSET + capacity * RECORD_BYTES
    problems: list[str] = []
    for _ in range(_MAX_TRIES):
        problems.clear()
        for place in _run_folder(run) if keep else local_folders(run.run_id):
            path = place / f"{identity.key}.ring"
            try:
                if place.is_relative_to(_SHARED_MEMORY) and shutil.disk_usage(place).free < _SHARE_OF_FREE * size:
                    problems.append(f"{place}: too small")
                    continue
                return RingFile(path, capacity, first_step)
            except FileNotFoundError as error:
                problems.append(f"{place}: {error.strerror}")
                break  # a sidecar that ends has removed the folder in this instant
            except OSError as error:
                problems.append(f"{place}: {error.strerror or error}")
        else:
            break
    where = "; ".join(problems) or "no folder of this user"
    raise RunStoreError(f"no place for a ring file of {size} bytes: {where}. Set TMPDIR to a local disk with room")


def writer_lives(path: Path) -> bool:
    """Whether the process that made a ring file lives; the file's name tells which it is (Identity.key)."""
    process = [int(word) for word in path.stem.split("-")[-2:] if word.isdigit()]
    return len(process) == 2 and process_started(process[0]) == process[1]


def _run_folder(run: RunDirectory) -> Iterator[Path]:
    run.rings.mkdir(mode=0o700, exist_ok=True)
    yield run.rings
