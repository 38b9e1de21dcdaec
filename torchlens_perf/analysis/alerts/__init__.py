"""Alerts: what starts, changes and ends."""
