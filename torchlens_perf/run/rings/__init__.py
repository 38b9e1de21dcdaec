"""Storage of ring files, and copying rings without a live reader into the run directory."""
