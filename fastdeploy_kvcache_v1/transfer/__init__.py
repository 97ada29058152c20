"""Blocks from a prefill worker to a decode worker: the decode worker reads, each side writes only its own memory."""
