"""A device: events, clock, spans, waits, memory, kernels, driver. Imported only if torch has one."""
