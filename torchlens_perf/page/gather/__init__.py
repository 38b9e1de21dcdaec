"""Read a run directory into the data of a page."""
