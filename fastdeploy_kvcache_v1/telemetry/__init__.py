"""Metrics, recorded traces, and figures."""
