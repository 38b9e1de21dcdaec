"""Layout of a run's files: the run directory, and the files in shared memory of each node.

::

    torchlens-perf/20261121-0132-3fa9c1d2/
      nodes/NODE.json      sidecar state: statistics, cursors, quality (input of reports)
      nodes/NODE.rings     paths of the ring files in rings/ of this node, one a line
      nodes/NODE.log       log of the sidecar
      steps/NODE-*.parquet one row a step and rank
      spans/NODE-*.parquet one row a record
      events/NODE-*.parquet  one row an event of a job with roles, see roles/
      events/NODE.until    until when a node has written its events, before it has written all
      oom/rankNNNNN-STEP.json, .txt  live memory of a device at an out-of-memory error
      gpus/NODE-*.parquet  one row a GPU and second; links/ one row a port and five seconds
      captures/            detailed traces of a few steps, see captures.py
      rings/KEY.ring       ring files that no sidecar reads while the job runs
      report.txt, .html    the last report, as text and as a page

    /dev/shm/torchlens-perf-UID/
      .run-...             the run id that all ranks of one launcher use
      20261121-0132-3fa9c1d2.5d41ab/   5d41ab: digest of boot and PID namespace, see place/node.py
        KEY.ring           a rank's ring file, or a link to the memory of the process that made it
        KEY.held           a link to the process that keeps such memory open
        TIME-KEY.registered  a link to a ring file that a sidecar can read
        KEY.events         events of a process of a job with roles, see roles/event_file.py
        KEY.report, .answer, .view, .alerts   messages from the sidecar, see mailbox.py
        sidecar.lock, sidecar.log  the log is here until the run directory exists

A write to a file that is mapped from a disk may block, or end the process (SIGBUS). Ring files are
therefore in shared memory. If shared memory is too small, anonymous memory is used instead
(rings/memory.py).

The training process and the sidecar communicate through files in shared memory, or in the temporary
directory if there is no shared memory. The disk of the run directory may not respond. The training
process accesses it only if there is no sidecar.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
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
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.run import file_checks, mailbox, make_folders, ownership
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.place.node import namespace_digest, pid_namespace_inode
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.ring import (
    RECORD_BYTES,
    RECORDS_OFFSET,
    STATE,
    RingFile,
    State,
    reading_ring,
)
from torchlens_perf.run.rings import memory

# A run id is the name of a folder. It must not be a path.
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MEMBER = "-rank"
# The second group of the pattern matches the PID namespace.
_CLAIM_NAME = re.compile(rf"(\.(?:run|off)-(\d+)-.*?\.\d+)(?:{_MEMBER}\d+)?")
_REGISTERED, _HELD = ".registered", ".held"
SIDECAR_LOCK, _LOG = "sidecar.lock", "sidecar.log"
_SHARED_MEMORY = Path("/dev/shm")
_REMOVED = "removed or renamed while the run recorded"
# A ring file takes at most 1/16 of the free space. Containers often have only 64 MB of shared
# memory, which DataLoaders also need.
_SHARE_OF_FREE = 16
_MAX_RINGS_BYTES = 1 << 24
# Attempts to use a folder that an ending sidecar may remove at the same time.
_MAX_TRIES = 5
# Errors that a limit of the process (ulimit) causes in every folder.
_LIMITS_OF_PROCESS = (errno.EFBIG, errno.EMFILE)

_T = TypeVar("_T")


TABLES = ("steps", "spans", "gpus", "links", "processes", "events")
"""Folders of the run directory that contain the Parquet files of one table each."""


class RunDirectory:
    """Paths inside one run directory."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """shared: make new folders readable for the group."""
        self.path = path
        self.shared = shared
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

    def why_unreadable(self) -> str:
        """Return why no report can be made: missing folder, not a run directory, or no data yet."""
        if not os.path.isdir(self.path):
            return (
                f"{self.path} is not a directory"
                if os.path.exists(self.path)
                else f"there is no directory {self.path}"
            )
        if os.path.isdir(self.nodes):
            return (
                f"{self.path} has no data yet. A run that starts has some in a few seconds, or in"
                " 90 s if the job keeps all CPUs busy. If the job has ended, run"
                f" `torchlens-perf sidecar {self.path}`"
            )
        runs = sorted(nodes.parent.name for nodes in self.path.glob("*/nodes"))
        if runs:
            return (
                f"{self.path} is a folder of runs: name one of them, as in {self.path / runs[-1]}"
            )
        return f"{self.path} is not a run directory: it has no folder nodes"

    def node_state_path(self, node: str) -> Path:
        return self.nodes / f"{node}.json"

    def node_rings_path(self, node: str) -> Path:
        return self.nodes / f"{node}.rings"

    def node_log_path(self, node: str) -> Path:
        return self.nodes / f"{node}.log"

    def oom_table_path(self, rank: int, step: int) -> Path:
        return self.oom / f"rank{rank:05d}-{step}.json"

    def describe_write_error(self, error: Exception) -> str:
        """Return why a file in the run directory could not be written."""
        missing = filter(file_checks.is_missing, (self.path, *self.folders))
        removed = next(missing, None) if isinstance(error, FileNotFoundError) else None
        return str(error) if removed is None else f"{removed} was {_REMOVED}"

    @property
    def folders(self) -> list[Path]:
        """Folders that create() makes."""
        return [self.steps, self.spans, self.nodes]

    def create(self) -> list[str]:
        """Make the missing folders and return their paths.

        Raise RunStoreError if a folder cannot be made.
        """
        try:
            access = make_folders.SHARED if self.shared else make_folders.PRIVATE
            return make_folders.make_folders([str(folder) for folder in self.folders], access)
        except ours(OSError) as error:
            raise RunStoreError(f"cannot write to {self.path}: {error.strerror or error}") from None

    def register_ring(self, node: str, ring: Path) -> None:
        """Announce a readable ring file to the node's sidecar. Raise OSError or RunStoreError."""
        if not ring.is_relative_to(self.path):
            # Sidecars process the links in alphabetical order, so names start with the time.
            link = f"{time.monotonic_ns():020d}-{ring.stem}{_REGISTERED}"
            call_in_local_folder(self.run_id, lambda folder: os.symlink(ring, folder / link))
            return
        with open(
            self.node_rings_path(node), "ab", buffering=0, opener=ownership.open_to_append
        ) as file:
            try:
                # write(2) of a short line is atomic, so lines of several ranks cannot interleave.
                file.write(os.fsencode(ring) + b"\n")
            except ours(OSError):
                if not file.tell():
                    self.node_rings_path(node).unlink()
                raise

    def registered_rings(self, node: str) -> list[Path]:
        """Return the paths of the node's ring files in the order of their registration."""
        return self.rings_in_run_directory(node) + self.local_rings()

    def rings_in_run_directory(self, node: str) -> list[Path]:
        """Return the paths of the node's ring files in the run directory."""
        try:
            text = ownership.read_regular_file(self.node_rings_path(node), _MAX_RINGS_BYTES).decode(
                errors="surrogateescape"
            )
        except (FileNotFoundError, ownership.NotRegularFileError, ownership.TooLargeError):
            return []
        lines = text.splitlines(keepends=True)
        # The run directory may have been moved since the ranks registered their rings.
        return [
            self.rings / os.path.basename(line.rstrip("\n"))
            for line in lines
            if line.endswith("\n")
        ]

    def local_rings(self) -> list[Path]:
        """Return the paths of this node's ring files outside the run directory.

        The disk of the run directory is not accessed.
        """
        return [
            Path(os.readlink(link)) for link in sorted(self._find_local_files(f"*{_REGISTERED}"))
        ]

    def local_change_times_ns(self) -> list[int]:
        """Return when each folder of local_rings() last changed; 0 for a missing folder."""
        return [
            modified_ns(_local_folder_path(parent, self.run_id))
            for parent in _local_parent_folders()
        ]

    def find_local_mailboxes(self, kind: str) -> list[Path]:
        """Return the paths of this node's mailbox files of a kind, see mailbox.py.

        The processes that read these mailboxes may have ended.
        """
        return list(self._find_local_files(f"*{kind}"))

    def remove_ring(self, ring: Path) -> None:
        """Remove a ring file and its registrations, and its folder if no other file is left."""
        for path in self.ring_and_registration_paths(ring):
            memory.remove_ring_paths(str(path))
        # The folder may still contain other ring files or the sidecar's lock.
        remove_if_empty(ring.parent)

    def ring_and_registration_paths(self, ring: Path) -> list[Path]:
        """Return the paths of a ring file and of the links that register it on this node."""
        return [ring, *self._find_local_files(f"*-{ring.stem}{_REGISTERED}")]

    def remove_empty_local_folders(self) -> None:
        """Remove the run's empty folders on this node. Called by ranks that do not record."""
        for parent in _local_parent_folders():
            remove_if_empty(_local_folder_path(parent, self.run_id))

    def remove_local_leftovers(self) -> None:
        """Remove the run's leftover files on this node except the lock. Called by a sidecar that
        ends.
        """
        for path in self._find_local_files("*"):
            left = path.suffix == _REGISTERED and not path.exists()
            left |= (path.suffix == mailbox.EVENTS and not is_writer_running(path)) or (
                path.suffix in (*mailbox.KINDS, _HELD) and not path.with_suffix(".ring").exists()
            )
            if left or path.name == _LOG:
                path.unlink(missing_ok=True)

    def _find_local_files(self, pattern: str) -> Iterator[Path]:
        """Yield matching files in the run's folders on this node. Folders are not created."""
        for parent in _local_parent_folders():
            folder = _local_folder_path(parent, self.run_id)
            if _is_private_folder(parent) and _is_private_folder(folder):
                yield from list(folder.glob(pattern))


def claim_run_id(digest: str, origin: int, *, proposal: str = "", member: int | None = None) -> str:
    """Return the run id that all ranks of a launcher on this node use.

    The ranks of a node call this function at almost the same time and must get the same id. The
    first rank stores its proposal as the target of a symbolic link, which only one process can
    create. Later calls remove the link after the launcher and all ranks have ended.

    digest: identifies the launcher. origin: pid of the launcher. A process that is its own launcher
    does not share its id. proposal: by default the current time and the digest. member: number of
    the calling rank, if the launcher starts each rank only once per run. A new run begins if the
    same member calls again, or if all members have ended. Raise RunStoreError if no folder of this
    node is writable.
    """
    proposal = proposal or f"{time.strftime('%Y%m%d-%H%M%S')}-{digest}"
    run_id = (
        proposal
        if origin == os.getpid()
        else _claim_or_join("run", digest, origin, proposal, member)
    )
    if not _RUN_ID.fullmatch(run_id):
        raise RunStoreError(f"{run_id!a}, which another rank is said to have chosen, is no run id")
    return run_id


def is_first_caller(digest: str, origin: int) -> bool:
    """Return True in the first process of a launcher on this node that calls this function.

    Raise the same errors as claim_run_id().
    """
    return origin == os.getpid() or _claim_or_join("off", digest, origin, str(os.getpid())) == str(
        os.getpid()
    )


def _claim_or_join(
    kind: str, digest: str, origin: int, proposal: str, member: int | None = None
) -> str:
    """Return this rank's proposal if it is the first rank, else the proposal of the first rank."""
    stem = f".{kind}-{pid_namespace_inode()}-{digest}."

    def claim(folder: Path) -> str:
        _remove_stale_claims(folder)
        for nth in itertools.count():
            link = folder / f"{stem}{nth}"
            with contextlib.suppress(FileExistsError):
                # The link's target is the content and not a path, because links appear atomically.
                os.symlink(f"{_process_key(origin)}:{proposal}", link)
            holder, _, claimed = os.readlink(link).partition(":")
            if _join_claim(link, holder, member):
                return claimed
        raise AssertionError

    return call_in_local_folder("", claim)


def _join_claim(link: Path, holder: str, member: int | None) -> bool:
    """Register this process as a member of a claim. Return False if the claim is an old run's."""
    if member is None:
        return _is_running(holder)
    mark = link.with_name(f"{link.name}{_MEMBER}{member}")
    others = [os.readlink(other) for other in link.parent.glob(f"{link.name}{_MEMBER}*")]
    if others and not any(map(_is_running, others)):
        return False
    try:
        os.symlink(_process_key(os.getpid()), mark)
    except FileExistsError:
        return os.readlink(mark) == _process_key(os.getpid())
    return True


def _process_key(pid: int) -> str:
    return f"{pid}-{process_start_ticks(pid) or 0}"


def _is_running(process: str) -> bool:
    """Return True if the process with this value of _process_key() is running."""
    pid, _, started = process.partition("-")
    return pid.isdigit() and str(process_start_ticks(int(pid)) or 0) == started


def _remove_stale_claims(folder: Path) -> None:
    """Remove claims whose launcher and ranks have all ended."""
    holders: dict[str, list[tuple[Path, str]]] = {}
    for link in folder.glob(".*"):
        found = _CLAIM_NAME.match(link.name)
        # Process ids of other namespaces are not valid here.
        if found and int(found[2]) == pid_namespace_inode():
            # Another process may have just removed the claim.
            with suppress(OSError):
                holders.setdefault(found[1], []).append((link, os.readlink(link).partition(":")[0]))
    for links in holders.values():
        if not any(_is_running(process) for _, process in links):
            for link, _ in links:
                link.unlink(missing_ok=True)


def create_local_folders(run_id: str) -> Iterator[Path]:
    """Make and yield this user's folders on this node for ring files and lock, best first.

    run_id: "" for the folders that all runs share.
    """
    for parent in _local_parent_folders():
        for _ in range(_MAX_TRIES):
            try:
                _make_private_folder(parent)
                folder = _make_private_folder(
                    _local_folder_path(parent, run_id) if run_id else parent
                )
            except FileNotFoundError:
                # The last process of another run may have just removed the parent folder.
                continue
            except ours(OSError):
                break
            yield folder
            break


def _local_parent_folders() -> Iterator[Path]:
    """Yield the parents of the folders of create_local_folders(), without making them.

    The temporary directory is determined last, because tempfile writes a file to determine it.
    """
    name = f"torchlens-perf-{os.getuid()}"
    yield _SHARED_MEMORY / name
    yield Path(tempfile.gettempdir()) / name


def _local_folder_path(parent: Path, run_id: str) -> Path:
    """Return the path of the run's folder for this PID namespace.

    Containers that share memory have different sidecars and process ids.
    """
    return parent / f"{run_id}.{namespace_digest()}"


def call_in_local_folder(run_id: str, work: Callable[[Path], _T]) -> _T:
    """Call `work` with the first folder of create_local_folders() in which it succeeds.

    Raise RunStoreError if it succeeds in no folder.
    """
    problem: OSError | None = None
    for _ in range(_MAX_TRIES):
        for folder in create_local_folders(run_id):
            try:
                return work(folder)
            except FileNotFoundError as error:
                # Another process has just removed the folder or a file in it.
                problem = error
                break
            except ours(OSError) as error:
                problem = error
    reason = f": {problem.strerror or problem}" if problem is not None else ""
    raise RunStoreError(
        f"neither {_SHARED_MEMORY} nor {tempfile.gettempdir()} can be written{reason}"
    ) from problem


def find_sidecar_lock(run_id: str) -> Path | None:
    """Return the path of the node's sidecar lock file if it exists. Nothing is created."""
    paths = (
        _local_folder_path(parent, run_id) / SIDECAR_LOCK for parent in _local_parent_folders()
    )
    return next((path for path in paths if path.exists()), None)


def sidecar_lock_path(run_id: str) -> Path:
    """Return the path of the node's sidecar lock file, and make its folder.

    Raise RunStoreError if no folder is writable.
    """
    return call_in_local_folder(run_id, lambda folder: folder / SIDECAR_LOCK)


def sidecar_log_path(lock: Path) -> Path:
    """Return the path of the log that a sidecar uses before the run directory exists.

    lock: path of the sidecar's lock file.
    """
    return lock.with_name(_LOG)


def modified_ns(folder: Path) -> int:
    """Return when a folder or file last changed, by the clock of its disk; 0 if it is missing."""
    try:
        return os.stat(folder).st_mtime_ns
    except ours(OSError):
        return 0


def remove_if_empty(folder: Path) -> None:
    """Remove a run's folder, and the parent folder of all runs of this user, if they are empty."""
    with suppress(OSError):
        folder.rmdir()
    if folder.parent in _local_parent_folders():
        with suppress(OSError):
            folder.parent.rmdir()


def remove_empty_user_folders() -> None:
    """Remove the parent folders of this user's runs on this node if they are empty."""
    for parent in _local_parent_folders():
        if _is_private_folder(parent):
            with suppress(OSError):
                _remove_stale_claims(parent)
                parent.rmdir()


def _make_private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter. Raise PermissionError if the existing folder is
    not private.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_private_folder(path):
            # lstat() raises FileNotFoundError if the folder has just been removed.
            path.lstat()
            raise PermissionError(f"{path} is not this user's own folder") from None
    return path


def _is_private_folder(path: Path) -> bool:
    try:
        found = path.lstat()
    except ours(OSError):
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not stat.S_IMODE(found.st_mode) & 0o022
    )


def create_ring(
    run: RunDirectory, identity: Identity, capacity: int, *, first_step: int = 0, keep: bool = False
) -> RingFile:
    """Create this rank's ring file.

    The caller registers the file after it has published the metadata, because a sidecar needs them.

    first_step: index of the first recorded step. keep: True if no sidecar reads the file while the
    job runs. If True, the file is created in the run directory if it can be mapped safely there.
    Raise RunStoreError if no folder has enough space.
    """
    size = RECORDS_OFFSET + capacity * RECORD_BYTES
    problems: list[str] = []
    for _ in range(_MAX_TRIES):
        problems.clear()
        for place, anonymous in _find_ring_places(run, size, problems, keep=keep):
            try:
                made = RingFile(
                    place / f"{identity.key}.ring", capacity, first_step, anonymous=anonymous
                )
                made.run_dir = str(run.path)
                return made
            except FileNotFoundError as error:
                problems.append(f"{place}: {error.strerror}")
                # A sidecar that is ending has just removed the folder.
                break
            except ours(OSError) as error:
                problem = f"{'memory' if anonymous else place}: {error.strerror or error}"
                problems.append(problem)
                if error.errno in _LIMITS_OF_PROCESS:
                    raise RunStoreError(
                        f"no place for a ring file of {size} bytes: {problem}"
                    ) from None
        else:
            break
    where = "; ".join(dict.fromkeys(problems)) or "no folder of this user"
    raise RunStoreError(f"no place for a ring file of {size} bytes: {where}")


def _find_ring_places(
    run: RunDirectory, size: int, problems: list[str], *, keep: bool
) -> Iterator[tuple[Path, bool]]:
    """Yield folders for a ring file, best first, and add a reason to `problems` for each refusal.

    The second value is True if the folder contains only a link to a ring in anonymous memory.
    """
    if keep:
        # mkdir(exist_ok=True) would take any OSError for an existing folder.
        with contextlib.suppress(FileExistsError):
            run.rings.mkdir(mode=0o700)
        if memory.is_on_file_system(run.rings, memory.WITHOUT_SIGBUS):
            yield run.rings, False
    for folder in create_local_folders(run.run_id):
        if not memory.is_on_file_system(folder, memory.IN_MEMORY):
            problems.append(f"{folder}: not in memory")
        elif shutil.disk_usage(folder).free < _SHARE_OF_FREE * size:
            problems.append(f"{folder}: too small")
        else:
            yield folder, False
        yield folder, True


def describe_removed_ring(ring: Path) -> str:
    """Return why no report can contain the records of a ring file that does not exist."""
    return f"there is no report: {ring} was {_REMOVED}"


def describe_kept_records(run: RunDirectory) -> str:
    """Return sentences for a message: where unsaved records are kept, and how to save them later.

    Return "" if no ring file is left.
    """
    folders = sorted({str(ring.parent) for ring in run.local_rings() if ring.exists()})
    if not folders:
        return ""
    if file_checks.is_missing(run.path):
        # The next watch removes rings whose run directory is missing (sidecar/start/drain.py).
        return (
            f". Records that were not saved stay in {', '.join(folders)} until the next watch on"
            f" this node. To save them: torchlens-perf sidecar {run.path}"
        )
    return (
        f". The records stay in {', '.join(folders)} until this node restarts. Once the run"
        f" directory can be written: torchlens-perf sidecar {run.path}"
    )


def find_local_run_folders() -> Iterator[tuple[Path, float]]:
    """Yield this user's run folders on this node, each with the time of its last change."""
    for parent in _local_parent_folders():
        found: list[Path] = []
        with suppress(OSError):
            found = sorted(parent.iterdir()) if _is_private_folder(parent) else []
        for folder in found:
            if _is_private_folder(folder):
                yield folder, modified_ns(folder) / 1e9


def is_writer_running(path: Path) -> bool:
    """Return True if the process that made a ring file is running.

    The name of the file contains the process's pid and start time (Identity.key).
    """
    process = [int(word) for word in path.stem.split("-")[-2:] if word.isdigit()]
    return len(process) == 2 and process_start_ticks(process[0]) == process[1]


def is_recording(ring: Path) -> bool:
    """Return True if the process that made a ring file is running and has not closed the ring."""
    with reading_ring(ring) as reader:
        return (
            reader is not None
            and is_writer_running(ring)
            and reader.read_counter(STATE) == State.OPEN
        )
