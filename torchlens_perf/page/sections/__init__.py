"""The page's sections. Each section is an independent HTML fragment."""
