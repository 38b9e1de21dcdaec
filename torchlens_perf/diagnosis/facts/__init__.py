"""Facts about a run, as rows of the report, from the states of its processes. Pure."""
