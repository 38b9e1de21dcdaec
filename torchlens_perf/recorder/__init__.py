"""The recorder, the state of one watch, and all private names of torch that this package uses."""
