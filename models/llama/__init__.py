"""The Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen2.5."""

from haarkv.models.llama.config import SIZES, read_config

__all__ = ["SIZES", "read_config"]
