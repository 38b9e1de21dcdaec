"""Location of a process: its place in the job by its launcher, its node, and the run directory
shared by nodes.
"""
