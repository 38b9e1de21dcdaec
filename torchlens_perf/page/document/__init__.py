"""The page as one file, and who writes it."""
