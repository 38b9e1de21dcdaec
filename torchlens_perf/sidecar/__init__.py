"""The sidecar process of each node.

It reads the ranks' rings, finds slow ranks, exports data and writes the run directory.
"""
