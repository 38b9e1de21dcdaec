"""Analysis of records.

The functions are pure: they read no clock and no process, and no file except a node's saved state.
"""
