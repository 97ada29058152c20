"""Learning from traffic how soon blocks used once, twice or often are used again."""
