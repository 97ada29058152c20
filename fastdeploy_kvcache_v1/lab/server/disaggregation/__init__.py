"""Prefill and decode roles: their settings, and what a decode server asks of a prefill server."""
