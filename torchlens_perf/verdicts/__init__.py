"""Verdicts: what is wrong with a job, from when it was found to its end."""
