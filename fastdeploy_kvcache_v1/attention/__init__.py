"""Cache layouts, one module per attention family."""
