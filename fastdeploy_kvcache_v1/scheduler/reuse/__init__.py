"""What traffic teaches about blocks: how soon those used once, twice or often are used again."""
