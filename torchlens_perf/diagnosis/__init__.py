"""What bounds a job and what it loses: pure functions on node states and on the report's facts."""
