"""What tiers of other sizes would hit: the latest requests, played against cache managers of these sizes."""
