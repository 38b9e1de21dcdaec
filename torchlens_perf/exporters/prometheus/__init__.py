"""/metrics of the sidecar, for Prometheus. Needs prometheus_client; opens no port unless asked."""
