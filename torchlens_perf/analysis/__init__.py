"""Analysis of records.

The functions here are pure. They read no clock and no process, and no file except a node's saved
state.
"""
