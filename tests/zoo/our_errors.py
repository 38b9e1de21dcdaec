"""Raise an error class of torchlens_perf, which must be handled like any other error."""
import sys

from torchlens_perf import errors

raise getattr(errors, sys.argv[1])("raised by the script")
