"""The main module of a package that is executed with `-m`."""
import sys

from . import name, part

print(name, __name__, __package__, __spec__.name, sys.argv)
raise SystemExit(6)
