"""Layout of a run's files: the run directory, and the files that must be on this node.

::

    torchlens-perf/20261121-0132-3fa9c1d2/
      nodes/NODE.json      sidecar state: statistics, cursors, quality (input of reports)
      nodes/NODE.rings     paths of the ring files in rings/ of this node, one a line
      nodes/NODE.log       log of the sidecar
      steps/NODE-*.parquet one row a step and rank
      spans/NODE-*.parquet one row a record
      oom/rankNNNNN-STEP.json, .txt  live memory of a device at an out-of-memory error
      gpus/NODE-*.parquet  one row a GPU and second; links/ one row a port and five seconds
      outbox/              see exporters
      captures/            detailed traces of a few steps, see captures.py
      rings/KEY.ring       ring files, where no sidecar reads them while the job runs
      report.txt, .html    the last report, as text and as a page

    /dev/shm/torchlens-perf-UID/
      .run-...             the run id that the ranks of one launcher have agreed on
      20261121-0132-3fa9c1d2.5d41ab/   5d41ab: digest of boot and PID namespace, see place/node.py
        KEY.ring           a rank's ring file, or a link to the memory of the process that made it
        KEY.held           a link to the process that has such a ring open
        TIME-KEY.registered  a link to the ring: it can be read
        KEY.report, .answer, .view, .alerts   messages from the sidecar, see mailbox.py
        sidecar.lock, sidecar.log  the log is here until the run directory exists

A store into a file that is mapped from a disk may wait for the disk, or end the process (SIGBUS).
Rings are therefore in shared memory, or in anonymous memory where that is small (rings/memory.py).

The training process and the sidecar communicate in shared memory, or else in the temporary
directory. The training process touches the run directory only if there is no sidecar, because its
disk may not respond.
"""

from __future__ import annotations

import contextlib
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
from torchlens_perf.run import mailbox, make_folders, ownership
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.place.node import namespace_digest, pid_namespace_inode
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.ring import RECORD_BYTES, RECORDS_OFFSET, RingFile
from torchlens_perf.run.rings import memory

# A run id is the name of a folder. It must not be a path.
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MEMBER = "-rank"
# The second group is the PID namespace.
_CLAIM_NAME = re.compile(rf"(\.(?:run|off)-(\d+)-.*?\.\d+)(?:{_MEMBER}\d+)?")
_REGISTERED, _HELD = ".registered", ".held"
_LOCK, _LOG = "sidecar.lock", "sidecar.log"
_SHARED_MEMORY = Path("/dev/shm")
# A ring takes at most this part of the free space. Containers often have 64 MB, which DataLoaders
# need.
_SHARE_OF_FREE = 16
_MAX_RINGS_BYTES = 1 << 24
# Attempts to use a folder, which an ending sidecar may remove at that moment.
_MAX_TRIES = 5

_T = TypeVar("_T")


TABLES = ("steps", "spans", "gpus", "links", "processes")
"""Folders of the run directory with Parquet files, each a table."""


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
        """Return why there is no report: no folder, no run directory, or a run without data."""
        if not os.path.isdir(self.path):
            return (
                f"{self.path} is not a directory"
                if os.path.exists(self.path)
                else f"there is no directory {self.path}"
            )
        if os.path.isdir(self.nodes):
            return (
                f"{self.path} has no data yet: try again in some seconds, or, if the job has ended,"
                f" run `torchlens-perf sidecar {self.path}`"
            )
        runs = sorted(nodes.parent.name for nodes in self.path.glob("*/nodes"))
        if runs:
            return (
                f"{self.path} is a folder of runs: name one of them, as in {self.path / runs[-1]}"
            )
        return f"{self.path} is not a run directory: it has no folder nodes"

    def node_state(self, node: str) -> Path:
        return self.nodes / f"{node}.json"

    def node_rings(self, node: str) -> Path:
        return self.nodes / f"{node}.rings"

    def node_log(self, node: str) -> Path:
        return self.nodes / f"{node}.log"

    def oom_table(self, rank: int, step: int) -> Path:
        return self.oom / f"rank{rank:05d}-{step}.json"

    @property
    def folders(self) -> list[Path]:
        """Folders that create() makes."""
        return [self.steps, self.spans, self.nodes]

    def create(self) -> list[str]:
        """Make the folders.

        Return those that were missing. Raise RunStoreError if a folder cannot be made.
        """
        try:
            access = make_folders.SHARED if self.shared else make_folders.PRIVATE
            return make_folders.make_folders([str(folder) for folder in self.folders], access)
        except OSError as error:
            raise RunStoreError(f"cannot write to {self.path}: {error.strerror or error}") from None

    def register_ring(self, node: str, ring: Path) -> None:
        """Announce a readable ring file to the node's sidecar. Raise OSError or RunStoreError."""
        if not ring.is_relative_to(self.path):
            # The names start with the time, because sidecars process them in alphabetical order.
            link = f"{time.monotonic_ns():020d}-{ring.stem}{_REGISTERED}"
            _call_in_local_folder(self.run_id, lambda folder: os.symlink(ring, folder / link))
            return
        with open(
            self.node_rings(node), "ab", buffering=0, opener=ownership.open_to_append
        ) as file:
            try:
                # One write(2) of a short line is atomic, so lines of other ranks cannot interleave.
                file.write(os.fsencode(ring) + b"\n")
            except OSError:
                if not file.tell():
                    self.node_rings(node).unlink()
                raise

    def registered_rings(self, node: str) -> list[Path]:
        """Return the node's ring files so far, in the order of their registration."""
        return self.kept_rings(node) + self.local_rings()

    def kept_rings(self, node: str) -> list[Path]:
        """Return the node's ring files in the run directory."""
        try:
            text = ownership.read_regular_file(self.node_rings(node), _MAX_RINGS_BYTES).decode(
                errors="surrogateescape"
            )
        except (FileNotFoundError, ownership.NotRegularFileError, ownership.TooLargeError):
            return []
        lines = text.splitlines(keepends=True)
        return [Path(line.rstrip("\n")) for line in lines if line.endswith("\n")]

    def local_rings(self) -> list[Path]:
        """Return the ring files outside of the run directory, without access to its disk."""
        return [Path(os.readlink(link)) for link in sorted(self._local_files(f"*{_REGISTERED}"))]

    def local_changes_ns(self) -> list[int]:
        """Return the time of the last change of each folder of local_rings(); 0 if it is
        missing.
        """
        return [
            _modified_ns(_local_folder_path(parent, self.run_id))
            for parent in _local_parent_folders()
        ]

    def local_mailboxes(self, kind: str) -> list[Path]:
        """Return this node's mailbox files of a kind, see mailbox.py.

        Their readers may have ended.
        """
        return list(self._local_files(f"*{kind}"))

    def remove_ring(self, ring: Path) -> None:
        """Remove a ring file and its registrations, and its folder if that is empty then."""
        for path in self.ring_files(ring):
            memory.remove_ring_paths(str(path))
        # Other rings or the sidecar's lock may still be there.
        _remove_if_empty(ring.parent)

    def ring_files(self, ring: Path) -> list[Path]:
        """Return the paths of a ring file and of its registrations on this node."""
        return [ring, *self._local_files(f"*-{ring.stem}{_REGISTERED}")]

    def leave_local(self) -> None:
        """Remove the run's empty folders of this node, for ranks that do not record."""
        for parent in _local_parent_folders():
            _remove_if_empty(_local_folder_path(parent, self.run_id))

    def clear_local(self) -> None:
        """Remove leftover files of this node except the lock, when the sidecar ends."""
        for path in self._local_files("*"):
            left = path.suffix == _REGISTERED and not path.exists()
            left |= (
                path.suffix in (*mailbox.KINDS, _HELD) and not path.with_suffix(".ring").exists()
            )
            if left or path.name == _LOG:
                path.unlink(missing_ok=True)

    def _local_files(self, pattern: str) -> Iterator[Path]:
        """Yield the matching files in the run's folders of this node. Make no folder."""
        for parent in _local_parent_folders():
            folder = _local_folder_path(parent, self.run_id)
            if _is_private_folder(parent) and _is_private_folder(folder):
                yield from list(folder.glob(pattern))


def claim_run_id(digest: str, origin: int, *, proposal: str = "", member: int | None = None) -> str:
    """Return the run id for a launcher's digest.

    By default it has the start time of the run and the digest.

    The ranks of a node call this at almost the same time and must get the same id. The first rank
    stores its proposal as the target of a symbolic link, which only one process can create. Later
    calls remove the link once launcher and ranks have ended.

    origin: pid of the launcher. A process that is its own launcher shares the id with no process.
    member: number of the calling rank, if the launcher starts each rank only once per run. A new
    run begins if a member joins again, or if all have ended. Raise RunStoreError if no folder of
    this node is writable.
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
    """Return True on the first rank of the launcher that calls this on this node.

    Raise as claim_run_id().
    """
    return origin == os.getpid() or _claim_or_join("off", digest, origin, str(os.getpid())) == str(
        os.getpid()
    )


def _claim_or_join(
    kind: str, digest: str, origin: int, proposal: str, member: int | None = None
) -> str:
    """Return the proposal of the first rank."""
    stem = f".{kind}-{pid_namespace_inode()}-{digest}."

    def claim(folder: Path) -> str:
        _remove_stale_claims(folder)
        for nth in itertools.count():
            link = folder / f"{stem}{nth}"
            with contextlib.suppress(FileExistsError):
                # The link has no target. Its text is the content, which appears atomically.
                os.symlink(f"{_process_key(origin)}:{proposal}", link)
            holder, _, claimed = os.readlink(link).partition(":")
            if _join_claim(link, holder, member):
                return claimed
        raise AssertionError

    return _call_in_local_folder("", claim)


def _join_claim(link: Path, holder: str, member: int | None) -> bool:
    """Return True if this process shares a claim. If so, register it as a member."""
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
    """Return True if the process of this namespace that _process_key() named is running."""
    pid, _, started = process.partition("-")
    return pid.isdigit() and str(process_start_ticks(int(pid)) or 0) == started


def _remove_stale_claims(folder: Path) -> None:
    """Remove claims whose launcher and ranks have all ended."""
    holders: dict[str, list[tuple[Path, str]]] = {}
    for link in folder.glob(".*"):
        found = _CLAIM_NAME.match(link.name)
        # Process ids of other namespaces have no meaning here.
        if found and int(found[2]) == pid_namespace_inode():
            # Another process may have removed the claim.
            with contextlib.suppress(OSError):
                holders.setdefault(found[1], []).append((link, os.readlink(link).partition(":")[0]))
    for links in holders.values():
        if not any(_is_running(process) for _, process in links):
            for link, _ in links:
                link.unlink(missing_ok=True)


def create_local_folders(run_id: str) -> Iterator[Path]:
    """Yield this user's folders for the run's ring files and lock, best first.

    They are local to this node.
    """
    for parent in _local_parent_folders():
        for _ in range(_MAX_TRIES):
            try:
                _make_private_folder(parent)
                folder = _make_private_folder(
                    _local_folder_path(parent, run_id) if run_id else parent
                )
            except FileNotFoundError:
                # The last process of another run may have removed it just now.
                continue
            except OSError:
                break
            yield folder
            break


def _local_parent_folders() -> Iterator[Path]:
    """Yield the parents of create_local_folders(), without making them.

    The temporary directory comes last and is looked up late, because looking it up writes to disks.
    """
    name = f"torchlens-perf-{os.getuid()}"
    yield _SHARED_MEMORY / name
    yield Path(tempfile.gettempdir()) / name


def _local_folder_path(parent: Path, run_id: str) -> Path:
    """Return the run's folder for this PID namespace.

    Containers that share memory have separate sidecars and process ids.
    """
    return parent / f"{run_id}.{namespace_digest()}"


def _call_in_local_folder(run_id: str, work: Callable[[Path], _T]) -> _T:
    """Call `work` with the best folder of this node.

    Raise RunStoreError if no folder exists or is writable.
    """
    problem: OSError | None = None
    for _ in range(_MAX_TRIES):
        for folder in create_local_folders(run_id):
            try:
                return work(folder)
            except FileNotFoundError as error:
                # The folder, or a file in it, has been removed at this moment.
                problem = error
                break
            except OSError as error:
                problem = error
    reason = f": {problem.strerror or problem}" if problem is not None else ""
    raise RunStoreError(
        f"neither {_SHARED_MEMORY} nor {tempfile.gettempdir()} can be written{reason}"
    ) from problem


def find_sidecar_lock(run_id: str) -> Path | None:
    """Return sidecar_lock_path() if it exists. Make nothing."""
    paths = (_local_folder_path(parent, run_id) / _LOCK for parent in _local_parent_folders())
    return next((path for path in paths if path.exists()), None)


def sidecar_lock_path(run_id: str) -> Path:
    """Return the path of the node's sidecar lock file.

    Raise RunStoreError if no folder is writable.
    """
    return _call_in_local_folder(run_id, lambda folder: folder / _LOCK)


def sidecar_log_path(lock: Path) -> Path:
    """Return the sidecar's log file for the time before the run directory exists.

    lock: its sidecar_lock_path().
    """
    return lock.with_name(_LOG)


def _modified_ns(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _remove_if_empty(folder: Path) -> None:
    """Remove a run's folder, and the parent of all runs of this user, if they are empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    if folder.parent in _local_parent_folders():
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def remove_empty_user_folders() -> None:
    """Remove the folders that this user's runs share on this node, unless another run is in
    them.
    """
    for parent in _local_parent_folders():
        if _is_private_folder(parent):
            with contextlib.suppress(OSError):
                _remove_stale_claims(parent)
                parent.rmdir()


def _make_private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter. Refuse an existing one of another user."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_private_folder(path):
            # This raises FileNotFoundError if the folder has just been removed.
            path.lstat()
            raise PermissionError(f"{path} is not this user's own folder") from None
    return path


def _is_private_folder(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not stat.S_IMODE(found.st_mode) & 0o022
    )


def create_ring(
    run: RunDirectory, identity: Identity, capacity: int, *, first_step: int = 0, keep: bool = False
) -> RingFile:
    """Make this rank's ring file.

    Register it after its metadata are published: a sidecar cannot read it earlier.

    first_step: index of the first recorded step. keep: no process will read the ring while the job
    runs, so it is made in the run directory if it can be mapped there. Raise RunStoreError if no
    folder has room.
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
                # A sidecar that is ending has removed the folder at this moment.
                break
            except OSError as error:
                problems.append(f"{'memory' if anonymous else place}: {error.strerror or error}")
        else:
            break
    where = "; ".join(problems) or "no folder of this user"
    raise RunStoreError(f"no place for a ring file of {size} bytes: {where}")


def _find_ring_places(
    run: RunDirectory, size: int, problems: list[str], *, keep: bool
) -> Iterator[tuple[Path, bool]]:
    """Yield folders for a ring, best first.

    The second value is True if the ring is in anonymous memory and the folder only has a link.
    """
    if keep:
        run.rings.mkdir(mode=0o700, exist_ok=True)
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


def describe_kept_records(run: RunDirectory) -> str:
    """Return the end of a sentence: where unwritten records are stored, and how to
    show them later.
    """
    folders = sorted({str(ring.parent) for ring in run.local_rings()})
    if not folders:
        return ""
    return (
        f". The records stay in {', '.join(folders)} until this node restarts. Once the run"
        f" directory can be written: torchlens-perf sidecar {run.path}"
    )


def find_local_run_folders() -> Iterator[tuple[Path, float]]:
    """Return this user's local folders of runs on this node, each with the time of
    its last change.
    """
    for parent in _local_parent_folders():
        found: list[Path] = []
        with contextlib.suppress(OSError):
            found = sorted(parent.iterdir()) if _is_private_folder(parent) else []
        for folder in found:
            if _is_private_folder(folder):
                yield folder, _modified_ns(folder) / 1e9


def is_writer_running(path: Path) -> bool:
    """Return True if the process that made a ring file is running.

    The file's name identifies it (Identity.key).
    """
    process = [int(word) for word in path.stem.split("-")[-2:] if word.isdigit()]
    return len(process) == 2 and process_start_ticks(process[0]) == process[1]
