"""The sidecar's /metrics for Prometheus, which is off by default and needs prometheus_client."""
