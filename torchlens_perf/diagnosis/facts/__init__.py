"""Rows of the report, built from the states of the processes. Pure."""
