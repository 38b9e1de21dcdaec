"""What recording costs, measured. `make bench`, or `python -m benchmarks NAME ...`."""
