"""A module that fails as libraries do that miss a library."""
raise OSError("libfabric.so.1: cannot open shared object file")
