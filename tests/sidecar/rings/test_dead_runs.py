"""Tests of rings that killed jobs leave in shared memory.

Each test has a mount namespace with its own shared memory, so files of real dead jobs are safe.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.test_shared_folder import in_namespaces

pytestmark = in_namespaces

# Code of a rank with 20 finished steps and no sidecar.
RANK = """
import os, sys, time
from pathlib import Path
from tests.support.ranks import HOST, Rank
from torchlens_perf.run.directory import RunDirectory
run = RunDirectory(Path("runs/a-run").absolute())
run.create()
rank = Rank(run, 0, 1)
rank.steps(20, forward=4, backward=6, host=1)
print(rank.ring_path, flush=True)
"""
DEAD = f"""
import os, subprocess, sys
done = subprocess.run([sys.executable, "-c", {RANK + "os._exit(9)"!r}], stdout=subprocess.PIPE, text=True)
ring = done.stdout.strip()
folder = os.path.dirname(ring)
"""
DRAIN = """
from torchlens_perf.run import dead_runs
from torchlens_perf.sidecar.start import drain
"""
LEFT = "print(sorted(os.listdir('/dev/shm')))"
GONE = (
    """
import time
deadline_s = time.monotonic() + 100
while os.listdir('/dev/shm') and time.monotonic() < deadline_s: time.sleep(.1)
"""
    + LEFT
)


def in_own_memory(
    program: str, folder: Path, *unshare: str, size: str = "1g"
) -> subprocess.CompletedProcess[str]:
    script = (
        f'set -e; mount --make-rprivate /; mount -t tmpfs -o size={size} tmpfs /dev/shm; exec "$@"'
    )
    command = [
        "unshare",
        "--mount",
        *unshare,
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-c",
        program,
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def steps_of(folder: Path) -> list[int]:
    import pandas as pd

    return sorted(pd.read_parquet(folder / "runs/a-run/steps")["step"])


def test_next_start_saves_the_rings_of_a_killed_job(tmp_path: Path) -> None:
    """All steps are saved. Afterwards shared memory has neither rings nor empty folders."""
    done = in_own_memory(DEAD + DRAIN + "assert dead_runs.start_draining();" + GONE, tmp_path)

    assert done.stdout == "[]\n"
    assert steps_of(tmp_path) == list(range(20))


def test_rings_are_removed_if_the_run_directory_is_gone(tmp_path: Path) -> None:
    """The removed run directory is not created again. The log reports that the rings were removed."""
    gone = "import shutil; shutil.rmtree('runs'); os.utime(folder, (0, 0)); drain.drain_old_runs();"
    done = in_own_memory(DEAD + DRAIN + gone + LEFT, tmp_path)

    assert done.stdout == "[]\n"
    assert not (tmp_path / "runs").exists()
    assert "were removed: their run directory is gone" in done.stderr


CRASHES = """
import os, sys, time
import torch, torchlens_perf as perf
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def rings(): return sum(name.endswith(".ring") for _, _, names in os.walk("/dev/shm") for name in names)
for i in range(4):
    pid = os.fork()
    if not pid:
        watch = perf.watch(model, optimizer, dir="runs", report="off").__enter__()
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        os.killpg(os.getpgid(watch_sidecar(watch)), 9)
        os._exit(9)
    os.waitpid(pid, 0)
    deadline_s = time.monotonic() + 60
    while rings() > 1 and time.monotonic() < deadline_s: time.sleep(.1)
    print(rings())
"""


@pytest.mark.long
def test_rings_of_repeated_crashes_do_not_accumulate(tmp_path: Path) -> None:
    """Each job is killed together with its sidecar. The next start removes the files."""
    find = """
def watch_sidecar(watch):
    import time
    from torchlens_perf.run import sidecar_status
    from torchlens_perf.run.directory import find_sidecar_lock
    while not (pid := sidecar_status.read_status(str(find_sidecar_lock(watch.run_dir.name)))[0]):
        time.sleep(0.01)
    while os.getpgid(pid) == os.getpgrp():
        time.sleep(0.01)
    return pid
"""
    done = in_own_memory(find + CRASHES + DRAIN + "dead_runs.start_draining()" + GONE, tmp_path)

    assert done.stdout == "1\n" * 4 + "[]\n"


def test_rings_of_a_run_with_a_live_sidecar_are_kept(tmp_path: Path) -> None:
    """The lock shows that the sidecar is alive, even from another container."""
    locked = """
from torchlens_perf.run.directory import sidecar_lock_path
from torchlens_perf.run.sidecar_lock import SidecarLock
lock = SidecarLock(sidecar_lock_path("a-run"))
assert lock.acquire()
assert not dead_runs.start_draining()
lock.remove()
assert not dead_runs.start_draining(but="a-run")
assert dead_runs.start_draining()
"""
    done = in_own_memory(DEAD + DRAIN + locked + GONE, tmp_path)

    assert done.stdout == "[]\n"


def test_rings_are_kept_if_the_run_directory_is_not_writable(tmp_path: Path) -> None:
    """The rings must stay, because finished steps must not be lost."""
    refuses = (
        "import shutil; shutil.rmtree('runs/a-run/spans'); open('runs/a-run/spans', 'w').close();"
    )
    done = in_own_memory(
        DEAD
        + DRAIN
        + refuses
        + "os.utime(folder, (0, 0)); drain.drain_old_runs(); assert os.path.exists(ring)",
        tmp_path,
    )

    assert "stay: " in done.stderr


@pytest.mark.long
def test_rings_of_a_live_rank_in_another_pid_namespace_are_kept(tmp_path: Path) -> None:
    """The rank's pid does not exist in this namespace."""
    other_namespace = f"""
import os, subprocess, sys
rank = subprocess.Popen(
    ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", {RANK + "input()"!r}],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
ring = rank.stdout.readline().strip()
folder = os.path.dirname(ring)
os.utime(folder, (0, 0))
drain.drain_old_runs()
print(os.path.exists(ring))
rank.communicate("\\n")
os.utime(folder, (0, 0))
drain.drain_old_runs()
print(os.path.exists(ring))
"""
    done = in_own_memory(DRAIN + other_namespace, tmp_path)

    assert done.stdout == "True\nFalse\n"
    assert steps_of(tmp_path) == list(range(20))


BEGIN_AND_END = """
import os, sys, time
from pathlib import Path
from torchlens_perf.run.directory import RunDirectory, remove_empty_user_folders, sidecar_lock_path
from torchlens_perf.run.sidecar_lock import SidecarLock
from tests.support.ranks import HOST, identity_of
from torchlens_perf.run.directory import create_ring
print("ready", flush=True)
input()
for i in range(300):
    run = RunDirectory(Path("runs") .absolute() / f"{os.getpid()}-{i}")
    ring = create_ring(run, identity_of(run, 0), 1024)
    assert str(ring.path).startswith("/dev/shm/"), ring.path
    run.register_ring(HOST, ring.path)
    lock = SidecarLock(sidecar_lock_path(run.run_id))
    assert lock.acquire()
    run.remove_ring(ring.path)
    ring.close()
    ring.release()
    lock.remove()
    remove_empty_user_folders()
"""


@pytest.mark.long
def test_concurrent_starts_and_ends_keep_folders_in_use(tmp_path: Path) -> None:
    """Other processes remove empty folders meanwhile. When all runs have ended, no folder is left."""
    several = f"""
import subprocess, sys
command = [sys.executable, "-c", {BEGIN_AND_END!r}]
runs = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
for run in runs: run.stdout.readline()
for run in runs: run.stdin.write("\\n"); run.stdin.flush()
for run in runs: assert run.wait() == 0
import os
"""
    done = in_own_memory(several + LEFT, tmp_path)

    assert done.stdout == "[]\n"


KILLED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from torchlens_perf.run.directory import RunDirectory
trainer = subprocess.Popen([sys.executable, sys.argv[1], "runs", "never"])
def until(condition):
    deadline_s = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found
nodes = until(lambda: list(Path("runs").glob("*/nodes")))
run = RunDirectory(nodes[0].parent.absolute())
ring = until(run.local_rings)[0]
assert ring.is_symlink(), "it is in the memory of its process"
until(ring.with_suffix(".held").is_symlink)
from torchlens_perf.run.ring import STEP, RingReader
reader = RingReader(ring)
until(lambda: reader.read_counter(STEP) > 100)
trainer.kill()
trainer.wait()
finished = reader.read_counter(STEP)
reader.close()
until(lambda: not list(run._find_local_files("*")))
print(finished)
"""


def test_anonymous_ring_of_a_killed_process_is_saved(tmp_path: Path) -> None:
    """Shared memory is too small for the ring.

    The sidecar keeps the anonymous memory open and loses no record.
    """
    from tests.support.processes import SCRIPTS, report
    from torchlens_perf.run.directory import RunDirectory

    script = KILLED.replace("sys.argv[1]", repr(str(SCRIPTS / "train_until_told.py")))
    done = in_own_memory(script, tmp_path, size="1m")
    (path,) = (tmp_path / "runs").iterdir()
    (rank,) = report(RunDirectory(path))["ranks"]

    assert rank["steps"] - int(done.stdout) in (0, 1)
    assert (rank["state"], rank["lost"]) == ("died", 0)


COPIED = """
import os, sys
from pathlib import Path
from tests.support.ranks import HOST, identity_of
from torchlens_perf.recorder import keep_ring
from torchlens_perf.run.directory import RunDirectory, create_ring
run = RunDirectory(Path("runs/a-run").absolute())
run.create()
from torchlens_perf.run.rings import memory
memory.WITHOUT_SIGBUS = frozenset()
ring = create_ring(run, identity_of(run, 0), 1024, keep=True)
run.register_ring(HOST, ring.path)
ring.set_metadata({"whose": "ours"})
ring.close()
%s
print(keep_ring.copy_ring_to_run(run, HOST, ring, 60))
ring.release()
kept = os.path.isdir('runs') and [path.name for path in run.rings_in_run_directory(HOST)]
print(kept, [path.name for path in run.local_rings()])
"""


@pytest.mark.parametrize("size", ["64m", "1m"])
def test_anonymous_ring_is_copied_to_the_run_directory_without_a_sidecar(
    size: str, tmp_path: Path
) -> None:
    """The run directory cannot map files, so the ring is copied at the end."""
    from torchlens_perf.run.ring import RingReader

    done = in_own_memory(COPIED % "", tmp_path, size=size)
    (ring,) = (tmp_path / "runs/a-run/rings").iterdir()
    reader = RingReader(ring)

    assert done.stdout == f"\n['{ring.name}'] []\n"
    assert reader.read_metadata() == {"whose": "ours"}
    reader.close()


def test_ring_that_cannot_be_copied_is_reported(tmp_path: Path) -> None:
    """There is no sidecar and no space for a copy. The message contains the ring's path."""
    done = in_own_memory(
        COPIED % "import shutil; shutil.rmtree('runs'); open('runs', 'w').close()", tmp_path
    )

    assert "Not a directory; it stays in /dev/shm/" in done.stdout
