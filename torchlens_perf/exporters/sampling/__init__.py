"""Select the steps and ranks that are sent as traces. The number of spans is bounded for jobs of
any size.
"""
