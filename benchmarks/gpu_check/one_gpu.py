"""Two NCCL ranks on one GPU, which NCCL does not support: each rank is configured as a separate
host.

The ranks communicate over loopback sockets, unlike ranks of one node. Each rank is a process, and
the device alternates between the kernels of both ranks.
"""

from __future__ import annotations

import shutil
import subprocess

_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}  # fmt: skip


def two_hosts(rank: int) -> dict[str, str]:
    """Return the variables that make NCCL treat a rank as a separate host."""
    return {**_SETTINGS, "NCCL_HOSTID": f"torchlens-perf-{rank}"}


def refusal(words: str) -> str:
    """Return the line with NCCL's reason for its failure, or "" if NCCL did not fail."""
    if "nccl" not in words.lower():
        return ""
    lines = [
        line.strip() for line in words.splitlines() if "rror" in line or "uplicate GPU" in line
    ]
    return lines[-1][:160] if lines else "no word"


def small_shared_memory(mib: int = 64) -> list[str] | str:
    """Return a command prefix that limits /dev/shm to this size as in a container, or the reason
    why it is impossible.
    """
    if shutil.which("unshare") is None:
        return "there is no unshare"
    mount = f'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec "$@"'
    reason = ""
    for namespace in (["unshare", "-m"], ["unshare", "-rm"]):
        prefix = [*namespace, "sh", "-c", mount, "sh"]
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=10)
        if tried.returncode == 0:
            return prefix
        reason = (
            tried.stderr.strip().splitlines()[-1]
            if tried.stderr.strip()
            else f"exit code {tried.returncode}"
        )
    return f"a mount of its own is not permitted here: {reason}"
