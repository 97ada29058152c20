"""Metrics and recorded traces."""
