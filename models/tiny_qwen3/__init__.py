"""The checkpoint that ships, and how it was trained."""
