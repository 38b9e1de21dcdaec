"""Tests of /metrics, and of the shipped files for Prometheus, Grafana, Kubernetes and Slurm."""
