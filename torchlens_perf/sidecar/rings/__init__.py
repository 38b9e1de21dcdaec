"""Ring files in, segments out: what the sidecar reads, and where it keeps the records."""
