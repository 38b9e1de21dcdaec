"""Place of a process: in its job, on its node, and in a shared run directory."""
