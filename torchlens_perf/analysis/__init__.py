"""What is concluded from records. Values in, values out: no file but a node's state, no clock, no process."""
