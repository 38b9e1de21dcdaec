"""Start of the sidecar: wait with few imports, import on idle CPUs, then read the rings."""
