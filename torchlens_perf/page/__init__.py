"""The page: a run as one HTML file, and parts of it for the live page and notebooks."""
