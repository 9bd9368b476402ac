"""The Llama family: Llama 2 and 3, Mistral without its sliding window, Qwen2 and Qwen2.5."""

from haarkv.models.llama.config import SIZES, read_config
from haarkv.models.llama.layer import LayerWeights, decoder_layer

__all__ = ["SIZES", "LayerWeights", "decoder_layer", "read_config"]
