"""Delivery of OTLP requests: the outbox that queues them, transports, retries and counts."""
