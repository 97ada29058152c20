"""The worker process, and the engine's end of it."""
