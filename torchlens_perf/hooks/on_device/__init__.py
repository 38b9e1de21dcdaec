"""Hooks for a device (GPU or other accelerator): its times, memory, collectives and statistics."""
