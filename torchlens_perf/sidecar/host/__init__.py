"""Readers of Linux's data about the ranks and their node: processes, control groups, neighbours."""
