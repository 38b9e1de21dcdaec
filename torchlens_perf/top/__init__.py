"""A live run in a terminal.

The command only reads the run directory, so it does not affect the job.
"""
