"""Start of the sidecar: wait with few imports, import on idle CPUs, then run as a process."""
