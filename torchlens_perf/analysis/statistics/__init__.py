"""What the records of one rank or one node add up to."""
