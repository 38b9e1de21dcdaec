"""A group of exceptions, where Python has them."""
import sys

if sys.version_info >= (3, 11):
    raise ExceptionGroup("several", [ValueError(1), TypeError("two")])
raise ValueError(1)
