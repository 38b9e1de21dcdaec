"""Delivery of OTLP requests: queue, transports, retries and counts of items."""
