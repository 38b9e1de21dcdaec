"""Lost time of a job, what bounds it, and predicted gains of changes: pure functions."""
