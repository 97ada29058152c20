"""The engine thread: turns requests into steps, and results of steps into output."""
