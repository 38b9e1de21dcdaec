"""The sidecar's /metrics for Prometheus, off by default. It needs prometheus_client."""
