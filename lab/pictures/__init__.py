"""Figures of the docs that are drawn from the code itself."""
