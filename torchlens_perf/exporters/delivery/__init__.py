"""Delivery of OTLP requests: queue (outbox), transports, retries and counts of items."""
