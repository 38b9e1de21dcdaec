"""The node's hardware over time: GPUs and InfiniBand."""
