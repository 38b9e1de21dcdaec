"""Device times of collectives: NCCL's profiler plugin, and waits of DDP and FSDP2."""
