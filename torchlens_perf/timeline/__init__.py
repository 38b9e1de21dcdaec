"""Recorded steps as a trace for Perfetto: all ranks on one timeline. Start in export.py."""
