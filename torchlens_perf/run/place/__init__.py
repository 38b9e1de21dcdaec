"""Where a process is: in its job by its launcher, on its node, and in which run directory of several."""
