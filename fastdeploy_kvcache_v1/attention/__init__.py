"""Cache layouts, one module per attention family, and the registry that knows them by name."""
