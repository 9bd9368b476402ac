"""The Gemma family: Gemma 1, and the text models of Gemma 3."""

from haarkv.models.gemma.config import SIZES, read_config

__all__ = ["SIZES", "read_config"]
