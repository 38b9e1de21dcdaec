"""Results of a watch for the user: in notebooks, as values, through callbacks and in loggers.

These modules are imported when they are first used. Other processes compute the results: the
sidecar during the run and at its end, and a child process later. The training process does not
import the analysis code and reads no file of the run directory.
"""
