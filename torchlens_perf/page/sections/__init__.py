"""The page's sections. Each is an independent HTML fragment."""
