"""The page as one HTML document, and the function that writes it."""
