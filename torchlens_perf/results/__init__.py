"""Results of a watch for the user: in notebooks, as values, by callbacks and in loggers.

These modules are imported when they are first used. The results are computed in other processes: by
the sidecar during the run and at its end, by a child process later. The training process imports no
analysis, and reads no file of the run directory.
"""
