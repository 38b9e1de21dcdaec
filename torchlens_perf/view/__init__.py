"""The human-readable form of a report: headlines, tables and charts, and their renderers."""
