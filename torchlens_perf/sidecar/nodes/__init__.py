"""The exchange between the sidecars of several nodes."""
