"""Hooks, which record spans of the training loop. Each is attached while its context is active."""
