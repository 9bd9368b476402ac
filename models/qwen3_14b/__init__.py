"""The dense Qwen3 family, named after the member whose kernels were published."""
