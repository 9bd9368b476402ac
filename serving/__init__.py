"""The cache inside an engine that people already run."""
