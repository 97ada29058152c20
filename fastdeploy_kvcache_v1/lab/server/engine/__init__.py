"""The engine: turns requests into steps, and results of steps into output."""
