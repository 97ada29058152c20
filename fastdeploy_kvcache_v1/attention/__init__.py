"""Cache layouts of the attention families, and their registry."""
