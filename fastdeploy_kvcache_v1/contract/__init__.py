"""Messages between the scheduler half and the worker half, the table of flags, packages of extras."""
