"""Prefill/decode transfers: the decode worker reads, and each side writes only its own memory."""
