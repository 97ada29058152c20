"""Policies: which block leaves a tier next, and when a block is copied to the host."""
