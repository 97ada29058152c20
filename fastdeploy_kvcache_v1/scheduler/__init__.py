"""The scheduler half: decides which block is in which tier. Pure Python; `CacheManager` is its front door.

`CacheManager` is thread-safe: one lock covers all its parts, which are not. Nor is what hosts have of their own from
here: `BlockHasher`, `OpenPrefills`, `PrefillCosts`.
"""
