"""Stands in for torchvision where vLLM imports it with Qwen3.5 to serve text, which runs nothing of it."""

__version__ = "0.28.0"
