"""/metrics, and what is shipped for Prometheus, Grafana, Kubernetes and Slurm."""
