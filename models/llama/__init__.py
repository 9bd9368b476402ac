"""The Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen2.5."""

from haarkv.models.llama.config import DEFAULTS, SIZES, read_config

__all__ = ["DEFAULTS", "SIZES", "read_config"]
