"""Ring files, the run directory and identities: code of training processes and sidecars."""
