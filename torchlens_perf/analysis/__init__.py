"""Analysis of records.

Pure functions and values: they read no file except a node's state, no clock and no process.
"""
