"""A module of a package that is executed with `-m`: print its names, package and spec."""
from . import name

print(name, __name__, __package__, __spec__ and __spec__.name)
