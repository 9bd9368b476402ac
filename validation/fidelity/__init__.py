"""What a quantized cache costs a model's own predictions."""
