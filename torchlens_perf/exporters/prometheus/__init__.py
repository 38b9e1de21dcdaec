"""The sidecar's /metrics endpoint for Prometheus. It needs prometheus_client, and is off by default."""
