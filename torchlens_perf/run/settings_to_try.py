"""Settings of torch that `torchlens-perf try` can change from outside of a job's code."""

from __future__ import annotations

SETTINGS = (
    "loader.num_workers", "loader.pin_memory", "loader.persistent_workers", "loader.prefetch_factor",
    "ddp.bucket_cap_mb", "ddp.find_unused_parameters", "ddp.gradient_as_bucket_view", "ddp.static_graph",
    "optimizer.foreach", "optimizer.fused",
    "torch.num_threads", "torch.float32_matmul_precision", "cudnn.benchmark", "gc.freeze", "gc.threshold",
)  # fmt: skip
"""Names are OWNER.PARAMETER: parameters of DataLoader, DistributedDataParallel and optimizers, and
switches of torch, cuDNN and the garbage collector."""
