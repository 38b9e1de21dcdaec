"""Where the bytes of a ring lie, and how a ring that nobody reads meanwhile gets into the run directory."""
