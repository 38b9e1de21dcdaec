"""Readers of Linux's data about the ranks: their processes, control groups and CPU neighbours."""
