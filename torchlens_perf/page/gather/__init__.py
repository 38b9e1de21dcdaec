"""Reads a run directory into what a page holds."""
