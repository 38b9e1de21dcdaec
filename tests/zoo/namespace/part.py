"""A module in a folder without __init__.py."""
print(__name__, __package__, __spec__.name, __spec__.parent)
