"""Run launched.py under Ray Train with two workers on each of two nodes, and start the cluster.

Needs root.

Everything runs in a separate network namespace, because Ray listens on every address.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}  # fmt: skip
HERE = os.path.dirname(os.path.abspath(__file__))
ADDRESS, FOLDER, START_S = "127.0.0.1:6379", os.getcwd(), 60.0
GIVEN = ("TORCHLENS", "PYTHONPATH", "GLOO_", "OMP_", "STEPS", "SLOW_RANK")
_CLONE_NEWNET, _SIOCSIFFLAGS, _IFF_UP = 0x40000000, 0x8914, 1


def enter_own_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket() as any_socket:
        fcntl.ioctl(
            any_socket, _SIOCSIFFLAGS, array.array("B", struct.pack("16sH14x", b"lo", _IFF_UP))
        )


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Run a Ray cluster of two nodes with two processors each."""
    import ray

    # Use a short path, because the length of Ray's socket names is limited.
    temporary = tempfile.mkdtemp(prefix="ray")
    of_nodes = {
        "node-a": (
            "--head",
            "--port=6379",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={temporary}",
        ),
        "node-b": (f"--address={ADDRESS}", "--node-ip-address=127.0.0.2"),
    }
    environ = {name: value for name, value in os.environ.items() if not name.startswith(GIVEN)}
    nodes = []
    try:
        for node, arguments in of_nodes.items():
            command = [
                sys.executable,
                f"{HERE}/on_node.py",
                node,
                "0",
                "-m",
                "ray.scripts.scripts",
                "start",
            ]
            with open(f"{node}.log", "wb") as log:
                nodes.append(
                    subprocess.Popen(
                        [*command, *arguments, "--num-cpus=2", "--block"],
                        env=environ,
                        stdout=log,
                        stderr=log,
                    )
                )
            until_started(nodes[-1], Path(f"{node}.log"))
        ray.init(address=ADDRESS, log_to_driver=False, logging_level="error", runtime_env=given())
        yield
    finally:
        ray.shutdown()
        for each in reversed(nodes):
            # The signal also ends the processes that Ray has started.
            each.send_signal(signal.SIGTERM)
        for each in nodes:
            each.wait(30)
        shutil.rmtree(temporary)


def until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"a node did not start: {log.read_text()}")
        time.sleep(0.2)


def given() -> dict[str, dict[str, str]]:
    """Return the variables that workers need, because their nodes were not started for this job."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(GIVEN)}
    return {"env_vars": {**variables, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{HERE}"}}


def train_func() -> None:
    # Workers start in one of Ray's folders.
    os.chdir(FOLDER)
    import launched
    import torch.distributed as dist

    loss = launched.train_with(dist.get_rank())
    if dist.get_rank() == 0:
        Path("loss").write_text(loss)


def main() -> None:
    enter_own_network()
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with cluster():
        TorchTrainer(
            train_func,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=4),
            run_config=RunConfig(storage_path=f"{FOLDER}/ray"),
        ).fit()
    print("loss", Path("loss").read_text(), flush=True)


if __name__ == "__main__":
    main()
