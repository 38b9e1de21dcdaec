"""The process beside each node's ranks: it reads their rings, judges, exports, and writes the run directory."""
