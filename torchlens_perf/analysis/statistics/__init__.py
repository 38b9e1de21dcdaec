"""Statistics of the records of a rank or a node."""
