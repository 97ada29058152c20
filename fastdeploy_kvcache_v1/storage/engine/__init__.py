"""The engine's part of the storage tier: what is fetched and stored, when, and what is done without."""
