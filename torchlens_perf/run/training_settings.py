"""Settings of a training process that actions on verdicts depend on. None: not known.

Versions and variables of the environment are in ProcessState.settings.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """Settings of the DataLoader whose batches the training thread takes."""

    workers: int
    pin_memory: bool
    is_iterable: bool = False
    """True for an IterableDataset. Each new worker loads all of it, unless the dataset divides
    itself."""
    persistent_workers: bool = False
    restarts: int = 0
    """Number of calls of this loader's `__iter__` with workers after the settings were read."""
    restart_ns: int = 0
    """Time of these calls, which start new workers unless these are persistent."""
    worker_ns: tuple[int, ...] = ()
    """Times of a worker for a batch: in total, on CPUs, and in the collate function; () if unknown."""


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Settings of the first optimizer that stepped."""

    kind: str
    """Class name of torch.optim, or the full name of another class."""
    tensors: int
    """Number of parameters."""
    device: str
    """Device type of the parameters."""
    foreach: bool | None = None
    fused: bool | None = None
    can_fuse: bool = True
    """False if the fused form does not support the parameters or another setting."""


@dataclasses.dataclass(frozen=True)
class DdpSettings:
    """Arguments of DistributedDataParallel, and what its gradients look like after a step."""

    bucket_bytes: int
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    gradient_bytes: int
    """Total size of the gradients."""
    unused: int
    """Number of trained parameters without a gradient."""


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Settings that a process reads once, after its second and third step, but for `restarts`."""

    loader: LoaderSettings | None = None
    optimizer: OptimizerSettings | None = None
    ddp: DdpSettings | None = None
    compiled: bool | None = None
    """True if a model or one of its modules is compiled."""
    cuda_graphs: bool | None = None
    """True if a compiled module replays CUDA graphs (mode="reduce-overhead"); None without one."""
    zeroes_gradients: bool | None = None
    """True if gradients are set to zero in place instead of to None; None if not known."""
    cpus: str | None = None
    """Numbers of the CPUs that the process may use, such as "0-7"."""
    cpu_count: int | None = None
    free_memory_bytes: int | None = None
    """Memory of the machine that is available without swapping."""
