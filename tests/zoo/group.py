"""Raise an exception group, or one exception before Python 3.11."""
import sys

if sys.version_info >= (3, 11):
    raise ExceptionGroup("several", [ValueError(1), TypeError("two")])
raise ValueError(1)
