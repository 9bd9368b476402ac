"""The Gemma family: Gemma 1, and the text models of Gemma 3."""

from haarkv.models.gemma.config import DEFAULTS, SIZES, read_config

__all__ = ["DEFAULTS", "SIZES", "read_config"]
