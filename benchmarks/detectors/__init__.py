"""The benchmark of detectors: programs with planted faults, run under several tools, and scores."""
