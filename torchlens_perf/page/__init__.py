"""The page: a run as one HTML file, and its pieces for the live page and notebooks."""
