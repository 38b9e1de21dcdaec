"""Sentences that people read, made from values."""
