"""Layers against the reference: which stage of which layer drifts."""
