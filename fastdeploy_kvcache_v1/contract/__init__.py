"""Messages between the scheduler half and the worker half."""
