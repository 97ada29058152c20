"""What happened to requests: why they missed, what left the cache before, and a log for simulations of other sizes."""
