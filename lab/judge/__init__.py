"""How often the judge raises a false alarm."""
