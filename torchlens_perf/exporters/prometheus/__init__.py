"""The sidecar's /metrics for Prometheus. It is off by default and needs prometheus_client."""
