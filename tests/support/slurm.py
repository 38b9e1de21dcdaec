"""A Slurm cluster of two nodes on this machine: real daemons in separate namespaces."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launched import NODES, by_shell
from tests.support.servers import free_port


@contextlib.contextmanager
def cluster(folder: Path, settings: str = "") -> Iterator[dict[str, str]]:
    """Run the cluster.

    Yield the variables that srun needs. `settings` are additional lines of slurm.conf.

    The test is skipped if Slurm does not start.
    """
    folder.mkdir(mode=0o755)
    control, host = free_port(), socket.gethostname()
    socket_path, key = folder / "munge.socket", folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2"
        for node in NODES
    )
    (folder / "slurm.conf").write_text(f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket_path},cred_expire=10
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
FirstJobId={1000 + os.getpid() % 50000}
{nodes}
{settings}
PartitionName=all Nodes=ALL Default=YES State=UP
""")
    environ = {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={key}",
        f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log",
    ]  # fmt: skip
    daemons = [
        munge,
        ["slurmctld", "-D"],
        *(by_shell(node, "slurmd", "-D", "-N", node) for node in NODES),
    ]
    started = []
    try:
        for daemon in daemons:
            with open(folder / "daemons.log", "ab") as log:
                started.append(
                    subprocess.Popen(daemon, env={**os.environ, **environ}, stdout=log, stderr=log)
                )
            time.sleep(1)
        deadline_s = time.monotonic() + 30
        idle = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
        while (
            len(
                subprocess.run(
                    idle, env={**os.environ, **environ}, capture_output=True
                ).stdout.split()
            )
            < 2
        ):
            if time.monotonic() > deadline_s:
                pytest.skip(
                    "Slurm does not start here: " + (folder / "daemons.log").read_text()[-800:]
                )
            time.sleep(0.5)
        yield environ
    finally:
        for daemon in reversed(started):
            daemon.terminate()
        for daemon in started:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
