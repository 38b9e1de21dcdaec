"""Samplers of a node's GPUs, network ports and processes."""
