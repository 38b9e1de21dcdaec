"""Fail on import like a package whose shared library is missing."""
raise OSError("libfabric.so.1: cannot open shared object file")
