"""Tests of a folder shared by nodes, and of real disks and shared memories that are full, small,
read-only or missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.long import long, long_except
from tests.support.processes import SCRIPTS, report
from torchlens_perf.errors import RunStoreError
from torchlens_perf.run.directory import RunDirectory

WATCHED = str(SCRIPTS / "train_watched.py")


def _why_not() -> str:
    """Return the reason why tests cannot mount here, or an empty string."""
    if os.geteuid():
        return "namespaces with mounts and process ids of their own need root"
    done = subprocess.run(
        [
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "sh",
            "-c",
            "mount -t tmpfs tmpfs /dev/shm",
        ],
        capture_output=True,
        text=True,
    )
    return done.stderr.strip() if done.returncode else ""


REASON = _why_not()
in_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.mark.parametrize("times", [600, *long(3000)])
def test_concurrent_threads_create_one_folder(times: int, tmp_path: Path) -> None:
    """Four threads create the same folders.

    The threads have equal process ids, like processes in two containers.
    """
    failed: list[RunStoreError] = []

    def make() -> None:
        try:
            for number in range(times):
                RunDirectory(tmp_path / str(number // 100)).create()
        except RunStoreError as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    assert list(tmp_path.rglob(".writable-*")) == []


@in_namespaces
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("hosts", "memory"),
    [*long((("node-0", "node-1"), "own"), (("pod", "pod"), "own")), (("pod", "pod"), "shared")],
)
def test_equal_process_ids_on_two_nodes_are_recorded_separately(
    hosts: tuple[str, str], memory: str, tmp_path: Path
) -> None:
    """Two containers with a shared folder each have their own sidecar.

    The cases include containers with the host's name and its shared memory.
    """
    nodes = []
    for rank in range(2):
        environ = {
            **os.environ, "NODE": hosts[rank], "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "TORCHLENS_PERF_RUN_ID": "shared", "OMP_NUM_THREADS": "1", "MEMORY": memory,
        }  # fmt: skip
        command = [sys.executable, "-c", _AS_A_NODE, WATCHED, str(tmp_path), "30"]
        nodes.append(
            warm_python.WarmPython(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    said = [node.communicate(timeout=110) for node in nodes]
    run = RunDirectory(tmp_path / "shared")
    value = report(run)

    assert [node.returncode for node in nodes] == [0, 0], said
    assert len({out.partition("process ")[2].split()[0] for out, _ in said}) == 1, (
        "their process ids are equal"
    )
    assert [
        (rank["rank"], rank["host"], rank["steps"], rank["state"]) for rank in value["ranks"]
    ] == [
        (0, hosts[0], 30, "closed"),
        (1, hosts[1], 30, "closed"),
    ]
    assert value["quality"]["lost"] == 0
    assert not any("ring" in note for note in value["quality"]["notes"])
    assert len(list(run.nodes.glob("*.json"))) == 2


# The namespaces last as long as their first process, so that process waits for the program's
# children.
_AS_A_NODE = """
import ctypes, os, runpy, socket, subprocess, sys, time
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID = 0x20000, 0x4000000, 0x20000000
assert ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID) == 0
first = os.fork()
if first:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
socket.sethostname(os.environ["NODE"])
mounts = "mount --make-rprivate /; mount -t proc proc /proc"
if os.environ["MEMORY"] == "own":
    mounts += "; mount -t tmpfs tmpfs /dev/shm"
subprocess.run(["sh", "-ec", mounts], check=True)
program = os.fork()
if program:
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    while subprocess.run(["pgrep", "-f", "[t]orchlens_perf sidecar"], stdout=subprocess.DEVNULL).returncode == 0:
        time.sleep(0.1)
    os._exit(code)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def in_mounts(
    setup: str, folder: Path, steps: int = 20, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Train after a shell script has mounted file systems.

    $RUNS is the folder of run directories, and $TMPDIR another folder.
    """
    runs, temporary = folder / "runs", folder / "tmp"
    runs.mkdir()
    temporary.mkdir()
    environ = {
        **os.environ, "RUNS": str(runs), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1",
        "TORCHLENS_PERF_EXIT_TIMEOUT_S": "60", **environment,
    }  # fmt: skip
    script = f"mount --make-rprivate /\nmount -t tmpfs tmpfs /dev/shm\n{setup}"
    return warm_python.run(
        [sys.executable, "-c", _WITH_MOUNTS, script, WATCHED, str(runs), str(steps)],
        110,
        env=environ,
    )


_WITH_MOUNTS = """
import ctypes, runpy, subprocess, sys
CLONE_NEWNS = 0x20000
assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
subprocess.run(["sh", "-ec", sys.argv[1]], check=True)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def trained(done: subprocess.CompletedProcess[str]) -> str:
    """Return the result that the output contains."""
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("trained"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the parameters of an unrecorded run."""
    return trained(in_mounts("", tmp_path_factory.mktemp("unwatched"), TORCHLENS_PERF="0"))


SMALL_TMP = 'mount -t tmpfs -o size=1m tmpfs "$TMPDIR"'
OFF = {
    "no inodes": ('mount -t tmpfs -o nr_inodes=3 tmpfs "$RUNS"', "cannot write to ", "No space left on device"),
    "read-only": ('mount -t tmpfs -o ro tmpfs "$RUNS"', "cannot write to ", "Read-only file system"),
    "read-only, bound": (
        'mount --bind "$RUNS" "$RUNS"; mount -o remount,bind,ro "$RUNS"', "cannot write to ", "Read-only file system"
    ),
}  # fmt: skip


@in_namespaces
@pytest.mark.parametrize("name", long_except({"read-only"}, OFF))
def test_unwritable_folder_disables_recording_with_one_line(
    name: str, tmp_path: Path, expected: str
) -> None:
    """Training is the same as without recording."""
    setup, *words = OFF[name]
    done = in_mounts(setup, tmp_path)

    assert trained(done) == expected
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("torchlens_perf is off: ")
    assert all(word in done.stderr for word in words), done.stderr
    assert "recorded None" in done.stdout


# In this case the ring is in anonymous memory.
ON: dict[str, tuple[str, Callable[[str], bool]]] = {
    "no room in memory": (
        f"mount -t tmpfs -o size=1m tmpfs /dev/shm; {SMALL_TMP}",
        lambda said: "20 steps" in said,
    ),
    "no inodes in memory": (
        f"mount -t tmpfs -o nr_inodes=3 tmpfs /dev/shm; {SMALL_TMP}",
        lambda said: "20 steps" in said,
    ),
    "shared memory is full": (
        (
            "mount -t tmpfs -o size=1m tmpfs /dev/shm; dd if=/dev/zero of=/dev/shm/full bs=4k 2>"
            " /dev/null || true"
        ),
        lambda said: said.startswith("torchlens_perf: "),
    ),
    "small shared memory": (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm",
        lambda said: "20 steps" in said,
    ),
    "shared memory is read-only": (
        "mount -t tmpfs -o ro tmpfs /dev/shm",
        lambda said: "20 steps" in said,
    ),
    "no shared memory": ("mount --bind /proc /dev/shm", lambda said: "20 steps" in said),
    "a full disk": (
        (
            'mount -t tmpfs -o size=64k tmpfs "$RUNS"; dd if=/dev/zero of="$RUNS/full" bs=4k 2>'
            " /dev/null || true"
        ),
        lambda said: (
            said.startswith("torchlens_perf: no report: ") and "No space left on device" in said
        ),
    ),
}


@in_namespaces
@pytest.mark.parametrize("name", long_except({"no shared memory", "shared memory is full"}, ON))
def test_run_is_recorded_without_space_for_its_files(
    name: str, tmp_path: Path, expected: str
) -> None:
    """With a full disk, the final message contains the reason for the missing report."""
    setup, said = ON[name]
    # With full shared memory the sidecar cannot start, so there is no report to wait for.
    waits_s = "2" if name == "shared memory is full" else "60"
    done = in_mounts(setup, tmp_path, TORCHLENS_PERF_EXIT_TIMEOUT_S=waits_s)

    assert trained(done) == expected
    assert said(done.stderr), done.stderr
    assert "recorded None" not in done.stdout
