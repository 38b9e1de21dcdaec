"""Verdicts on a job: findings from their start to their end, their alerts and their sentences."""
