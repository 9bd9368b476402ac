"""Planted faults: one table, by what is wrong and where it must be found."""
