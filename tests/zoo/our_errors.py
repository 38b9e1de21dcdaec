"""Raises an error of our own kinds: in a script it is an error like any other."""
import sys

from torchlens_perf import errors

raise getattr(errors, sys.argv[1])("raised by the script")
