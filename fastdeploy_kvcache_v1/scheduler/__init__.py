"""The scheduler half: decides which block is in which tier. Pure Python; `CacheManager` is its front door."""
