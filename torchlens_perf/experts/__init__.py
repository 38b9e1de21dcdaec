"""Tokens that the experts of each rank receive, and whether they explain why a rank is slow.

Experts exchange tokens by `all_to_all_single` with split sizes. The sizes are integers of the host,
so no value is read from a device. load.py turns the exchanges of sampled steps into two signals of
a rank, and causes.py compares the signals of a slow rank with those of other ranks.
"""
