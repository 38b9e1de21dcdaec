"""Benchmarks of the costs of recording: `make bench`, or `python -m benchmarks NAME ...`."""
