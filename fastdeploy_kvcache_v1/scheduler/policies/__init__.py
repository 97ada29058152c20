"""What leaves a tier next, and what is copied to the host when."""
