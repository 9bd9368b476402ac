"""KV formats, the paged cache and the op tables."""
