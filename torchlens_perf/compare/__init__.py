"""Compare two sides of recorded runs: what changed, by how much, and how certain that is.

Start in comparison.py.
"""
