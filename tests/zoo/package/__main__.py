"""A package that is run."""
import sys

from . import name, part

print(name, __name__, __package__, __spec__.name, sys.argv)
raise SystemExit(6)
