"""How OTLP requests reach an endpoint: kept in an outbox, sent, tried again, and counted."""
