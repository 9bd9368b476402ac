"""Codebooks and rotations: everything about the formats that is data and not code."""

from haarkv.codebooks.tables import Codebook, Solver, haar_rotation, hadamard_signs, lloyd_max

__all__ = ["Codebook", "Solver", "haar_rotation", "hadamard_signs", "lloyd_max"]
