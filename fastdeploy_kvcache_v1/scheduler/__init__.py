"""The scheduler half: decides which block is in which tier. Pure Python; `CacheManager` is its front door.

`CacheManager` is thread-safe: one lock covers all its parts. `BlockHasher`, `OpenPrefills` and `PrefillCosts`, which
the hosts use by themselves, are not thread-safe.
"""
