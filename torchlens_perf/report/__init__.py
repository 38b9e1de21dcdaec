"""The report on a run: one value built from its nodes' state files.

Screens and JSON output are made from it.
"""
