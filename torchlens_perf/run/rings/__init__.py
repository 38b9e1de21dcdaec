"""Allocate memory for ring files, and copy ring files into the run directory."""
