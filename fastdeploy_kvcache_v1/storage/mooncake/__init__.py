"""The `mooncake` store: the memory of many machines as one, by Mooncake's own client and master."""
