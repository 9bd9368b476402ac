"""Formats by layer, chosen by their measured cost."""
