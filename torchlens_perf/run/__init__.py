"""What the training processes and their node's sidecar share: ring files, the run directory, and who a rank is."""
