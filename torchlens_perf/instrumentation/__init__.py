"""Entry points for OpenTelemetry's own tools.

A training process loads them only if those tools run in it.
"""
