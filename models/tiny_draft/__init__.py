"""A two-layer draft for `tiny_qwen3` that ships."""
