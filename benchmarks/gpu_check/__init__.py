"""Checks that need a GPU: `make gpu-check`, or `python -m benchmarks.gpu_check PART...`."""
