"""Training of the toys that ship."""
