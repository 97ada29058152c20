"""What leaves a tier next, and what is copied to the host when: one file per policy, named in `tables.py`."""
