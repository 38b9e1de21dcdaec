"""What writes marks into the ring file, what one watch holds, and every private name of torch that we use."""
