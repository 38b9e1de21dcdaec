"""Select the steps and ranks that are sent as traces, bounded for jobs of any size."""
