"""The dense Qwen3 family, named after the member whose kernels were published."""

from haarkv.models.qwen3_14b.config import DEFAULTS, SIZES, read_config

__all__ = ["DEFAULTS", "SIZES", "read_config"]
