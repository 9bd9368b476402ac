"""Qwen3.5, dense or with experts, and Qwen3-Next: of four layers three remember by Gated DeltaNet, one attends."""

from haarkv.models.qwen3_hybrid.config import DEFAULTS, SIZES, read_config

__all__ = ["DEFAULTS", "SIZES", "read_config"]
