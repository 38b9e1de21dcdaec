"""Programs that use the CPUs of a rank, as the sidecar samples them."""

from __future__ import annotations

from msgspec import Struct

RANK, CHILD, SIDECAR, OTHER_USER, OTHER = "rank", "child", "sidecar", "other user", "other"
OUTSIDE = (OTHER_USER, OTHER)
"""Owners that are no part of the job."""


class CpuProgram(Struct, frozen=True):
    """One program, with its use of CPUs while the rank waited for one."""

    name: str
    pid: int
    cpus: float
    """Number of CPUs that it used on average, over its newest samples."""
    owner: str
    """rank (of this job on this node), child (of such a rank, for example a data loader's worker),
    sidecar, other user, or other."""
