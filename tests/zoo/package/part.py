"""A module of a package that is run: relative imports, its package and its spec."""
from . import name

print(name, __name__, __package__, __spec__ and __spec__.name)
