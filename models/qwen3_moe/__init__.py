"""Qwen3 with experts: the attention of a dense Qwen3, and a router that sends each token through a few of many MLPs."""

from haarkv.models.qwen3_moe.config import DEFAULTS, SIZES, read_config

__all__ = ["DEFAULTS", "SIZES", "read_config"]
