"""Find a process's rank in its job, the name of its node, and its caller's trace context."""
