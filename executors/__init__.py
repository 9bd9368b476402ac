"""Executors: who runs a forward. One module each."""
