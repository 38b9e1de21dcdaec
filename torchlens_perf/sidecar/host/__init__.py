"""What Linux tells of the ranks and their node: processes, control groups, neighbours."""
