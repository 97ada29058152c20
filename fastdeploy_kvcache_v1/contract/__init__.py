"""What the scheduler half and the worker half say to each other."""
