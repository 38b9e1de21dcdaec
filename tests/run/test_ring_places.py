"""Tests that a write to a ring's memory never ends the process (by SIGBUS), on any file system.

Each test mounts file systems on /dev/shm or elsewhere, in its own mount namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.test_shared_folder import in_namespaces
from tests.support.long import long, long_except
from torchlens_perf.run.rings import memory

MIB = 1 << 20


def image(kind: str, place: str) -> str:
    """Return shell commands that mount a file system of the given kind from a file."""
    smallest = {"ext4": "16M", "xfs": "304M", "btrfs": "128M"}[kind]
    return (
        f"truncate -s {smallest} disk.img; mkfs.{kind} -q disk.img > made; mount -o loop disk.img"
        f" {place}"
    )


OVERLAY = (
    "mkdir -p lower upper work; mount -t overlay overlay -o"
    " lowerdir=lower,upperdir=upper,workdir=work {}"
)
# For each mounted file system: whether the ring is in a file, with a sidecar and without one.
PLACES = {
    "tmpfs": ("mount -t tmpfs -o size=8m tmpfs {}", True, True),
    "small tmpfs": ("mount -t tmpfs -o size=1m tmpfs {}", False, True),
    "ext4": (image("ext4", "{}"), False, True),
    "xfs": (image("xfs", "{}"), False, False),
    "btrfs": (image("btrfs", "{}"), False, False),
    "overlay": (f"mkdir own; mount -t tmpfs -o size=8m tmpfs own; cd own; {OVERLAY}", False, False),
}

# Make a rank's ring in shared memory or in the run directory, fill the file system, and write to
# the whole ring.
PROGRAM = """
import os, sys
from pathlib import Path
from tests.support.ranks import identity_of
from torchlens_perf.run import ring
from torchlens_perf.run.directory import RunDirectory, create_ring
from torchlens_perf.run.rings import memory

place, kept = Path(sys.argv[1]), sys.argv[2] == "kept"
run = RunDirectory((place if kept else Path.cwd() / "runs") / "a-run")
run.create()
if sys.argv[2] == "anywhere":  # what is not done
    path = place / "ring"
    buffer = memory.reserve_file(path, 4 << 20)
else:
    made = create_ring(run, identity_of(run, 0), 1024, keep=kept)
    path, buffer = made.path, made.buffer
print("file" if path.is_relative_to(place) and not path.is_symlink() else "elsewhere", flush=True)

def store(value):
    for page in range(8192, len(buffer), 4096):
        buffer[page] = value

def write_back():
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

store(1)
write_back()  # what is written back is guarded against writing: the next store asks the file system again
size = 1 << 20
with open(place / "full", "wb", buffering=0) as file:
    while size:
        try:
            file.write(os.urandom(size))
            os.fsync(file.fileno())
        except OSError:
            size = 4096 if size > 4096 else 0
for value in range(2, 8):
    store(value)
    write_back()
if sys.argv[2] != "anywhere":
    made.set_metadata({"whose": "a rank's"})
    reader = ring.RingReader(path)
    assert reader.read_metadata() == {"whose": "a rank's"}
print("survived", flush=True)
"""


def fill(setup: str, folder: Path, where: str) -> subprocess.CompletedProcess[str]:
    """Run the program with the file system on /dev/shm, or with "kept" or "anywhere" on another
    folder.
    """
    kind = setup.partition("mkfs.")[2].split(" ")[0]
    if kind and shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    if kind and not os.path.exists("/dev/loop-control"):
        pytest.skip("there are no loop devices")
    place = "/dev/shm" if where == "shared memory" else str(folder / "place")
    (folder / "place").mkdir()
    script = (
        "set -e; mount --make-rprivate /; mount -t tmpfs tmpfs /dev/shm;"
        f' ({setup.format(place)})\nexec "$@"'
    )
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-c",
        PROGRAM,
        place,
        where,
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    if "mount:" in done.stderr:
        pytest.skip(done.stderr.strip())
    return done


@in_namespaces
@pytest.mark.parametrize("where", ["shared memory", *long("kept")])
@pytest.mark.parametrize("kind", long_except({"tmpfs", "small tmpfs", "ext4", "overlay"}, PLACES))
def test_ring_can_be_written_on_a_full_file_system(kind: str, where: str, tmp_path: Path) -> None:
    """The ring is in a file only where a write to the mapped file cannot raise SIGBUS.

    Writing succeeds to the last byte.
    """
    setup, in_shared_memory, kept = PLACES[kind]
    done = fill(setup, tmp_path, where)

    assert done.returncode == 0, done.stderr
    in_file = in_shared_memory if where == "shared memory" else kept
    assert done.stdout.split() == ["file" if in_file else "elsewhere", "survived"]


@in_namespaces
def test_ring_in_a_btrfs_file_would_end_the_process(tmp_path: Path) -> None:
    """btrfs writes each block anew, so a write to the mapped file raises SIGBUS although blocks
    were reserved.

    Rings must never be in files of btrfs.
    """
    done = fill(PLACES["btrfs"][0], tmp_path, "anywhere")

    assert done.returncode == -7, (done.stdout, done.stderr)
    assert done.stdout.split() == ["file"]


def test_anonymous_ring_is_readable_until_its_last_holder_ends(tmp_path: Path) -> None:
    """The memory is opened through its creator's descriptor, and later through the descriptor of
    its holder.

    Without a holder, opening raises an error.
    """
    path = str(tmp_path / "rank00000-attempt0-1-2.ring")
    mapped, file = memory.reserve_anonymous(path, MIB)
    mapped[5] = 7
    assert not memory.wait_until_opened_elsewhere(path, file, 0)
    reader = memory.open_to_read(path)
    memory.announce_open_ring(path, reader)

    assert memory.wait_until_opened_elsewhere(path, file, 0)
    with pytest.raises(OSError, match="not permitted"):
        # A write to a truncated mapped file would end the process.
        os.truncate(path, 0)
    file.close()
    mapped.close()
    again = memory.open_to_read(path)
    assert os.pread(again, 1, 5) == b"\7"
    for each in (reader, again):
        os.close(each)
    with pytest.raises(FileNotFoundError, match="in the memory of a process that has ended"):
        memory.open_to_read(path)
    memory.remove_ring_paths(path)
    assert list(tmp_path.iterdir()) == []


def test_other_file_at_a_reused_descriptor_is_not_read(tmp_path: Path) -> None:
    """Another process may have the pid by now, or another file may have the descriptor."""
    path = tmp_path / "rank00000-attempt0-1-2.ring"
    with open(tmp_path / "theirs", "w") as theirs:
        path.symlink_to(f"/proc/{os.getpid()}/fd/{theirs.fileno()}")
        with pytest.raises(FileNotFoundError):
            memory.open_to_read(str(path))


def test_mapped_file_is_recognized_from_any_process(tmp_path: Path) -> None:
    """The file is recognized as long as it is mapped."""
    path = str(tmp_path / "ring")
    mapped = memory.reserve_file(path, MIB)
    program = (
        "import sys; from torchlens_perf.run.rings.memory import is_held;"
        " print(is_held(sys.argv[1]))"
    )
    asked = [sys.executable, "-c", program, path]
    said = [subprocess.run(asked, capture_output=True, text=True, check=True).stdout]
    mapped.close()
    said.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)

    assert said == ["True\n", "False\n"]
