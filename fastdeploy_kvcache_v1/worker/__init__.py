"""The worker half: moves bytes and decides nothing. `CacheController` is its front door."""
