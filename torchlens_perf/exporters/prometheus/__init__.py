"""The sidecar's /metrics endpoint for Prometheus. It is off by default and needs
prometheus_client.
"""
