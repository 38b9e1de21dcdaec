"""Hooks that are about a device: times, memory, collectives and statistics on it."""
