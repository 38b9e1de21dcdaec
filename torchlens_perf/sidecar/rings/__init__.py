"""Readers of the ranks' ring files and out-of-memory tables."""
