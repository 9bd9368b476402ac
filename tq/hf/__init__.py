"""The low-bit KV cache for Hugging Face models: `tq.TQCache` and `tq.generate`."""
