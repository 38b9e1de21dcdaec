"""A package."""
name = __name__
