"""Prefill and decode roles: settings, endpoints, and the decode server's client."""
