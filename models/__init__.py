"""Models: shapes, weights and forwards that take their ops as an argument."""
