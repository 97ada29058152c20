"""What leaves a tier next, and what is copied to the host when; `tables.py` names the eviction orders."""
