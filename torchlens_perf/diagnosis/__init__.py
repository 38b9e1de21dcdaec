"""What bounds a job, what it loses, and what changes would gain: pure functions on recorded times."""
