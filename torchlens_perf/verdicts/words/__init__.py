"""Sentences of verdicts, and their evidence."""
