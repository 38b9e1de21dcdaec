"""The human-readable form of a report: headlines, tables and charts as values, and the renderers
that draw them.
"""
