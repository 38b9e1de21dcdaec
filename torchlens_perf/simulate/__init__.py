"""Simulated jobs: recorded noise, planted faults, and the ring files that the ranks would have
written."""
