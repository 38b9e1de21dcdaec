"""Callbacks that do nothing."""
