"""What is known of every emitted kernel function after a run: the table that the tests of executed C++ end with."""

ROWS = {}
"""Program -> rows of (scope, kind of core, file, tasks that called it, what its program's outputs were found to be)."""
