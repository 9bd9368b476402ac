"""The dense Qwen3 family, named after the member whose kernels were published."""

from haarkv.models.qwen3_14b.config import SIZES, read_config
from haarkv.models.qwen3_14b.layer import decoder_layer
from haarkv.models.qwen3_14b.weights import LayerWeights

__all__ = ["SIZES", "LayerWeights", "decoder_layer", "read_config"]
